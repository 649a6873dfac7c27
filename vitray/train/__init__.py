"""Training: the door to Ray Train. `driver.train` starts it, `training.worker` is the loop."""
