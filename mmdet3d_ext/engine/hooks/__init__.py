"""Training hooks: optimizer step with its guard, EMA, checkpoints, evaluation, epoch set-up."""
from .buffers import BatchNormSyncHook
from .checkpoint import SafeCheckpointHook
from .ema import WeightAverageHook
from .epoch import EpochSetupHook
from .evaluation import EvaluationHook
from .optimizer import GuardedOptimizerHook
from .task_gradients import TaskGradientHook

__all__ = ['BatchNormSyncHook', 'EpochSetupHook', 'EvaluationHook', 'GuardedOptimizerHook', 'SafeCheckpointHook',
           'TaskGradientHook', 'WeightAverageHook']
