"""Sweeps: the door to Ray Tune. `driver.sweep` starts one, `trial.Trial` is what Tune runs."""
