"""Sweeps on Ray Tune: `sweep.sweep` runs one, `trial.TrialTrainable` is the trial that Tune runs."""
