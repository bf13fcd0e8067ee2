"""Training and evaluation loops on mmcv's runner, hooks, checkpoints, and how ranks are started."""
