"""Sweeps on Ray Tune: `driver.sweep` runs one, `trial.TrialTrainable` is the trial that Tune runs."""
