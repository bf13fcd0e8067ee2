"""Training and evaluation loops on mmcv's runner, hooks, checkpoints, and how ranks are started."""
from ..config import schema

# Keys that this package reads beside those that the schema lists.
schema.declare('auto_scale_lr', ('enable', 'base_batch_size'))
schema.declare('evaluation', {*(schema.KNOWN.get('evaluation') or ()), 'amp', 'save_best', 'rule', 'before_train', 'start'})
schema.declare('amp', ('dtype', 'loss_scale', 'enabled'))
schema.declare('ema', ('decay', 'momentum', 'evaluate', 'warm_up', 'type', 'enable', 'enabled'))
schema.declare('dist_params', ('backend', 'timeout'))
