"""Every error that rollout-pool raises on purpose, as one tree.

    RolloutPoolError
    ├── ConfigError             the configuration is wrong; raised before anything starts
    │   ├── UnsupportedModelError   the engine cannot serve this model correctly
    │   └── CapacityError           the planned memory or devices are not there
    ├── RequestError            one prompt or its sampling is wrong; fails its own group only
    ├── InputFileError          a file the user named cannot be read as what it should be
    ├── OutputFileError         a file the user named cannot be written
    ├── ActorStartError         a rollout actor did not come up within its deadline
    │   └── NoRoomError             the cluster had no room for it all the while
    ├── ActorLostError          a rollout actor died more often than the replays allowed
    ├── QueueFullError          more groups would wait than a pool may hold
    ├── PoolClosedError         the pool was shut down
    ├── WeightSyncError         new weights were refused or did not arrive; the old ones go on
    ├── WeightsLostError        a pool was started again and lost the weights it had
    └── VerificationError       log-probabilities differ by more than the stated tolerance

Each message names the input at fault and the way out. A message stays one line, so that the
command line can print it as it is.
"""

from __future__ import annotations


def one_line(error: BaseException, limit: int = 400) -> str:
    """What another library's error says, as part of a message."""
    return " ".join(str(error).split())[:limit]


class RolloutPoolError(Exception):
    """Base of every error that rollout-pool raises on purpose."""


class ConfigError(RolloutPoolError, ValueError):
    """The configuration is wrong. Raised before any actor starts."""


class UnsupportedModelError(ConfigError):
    """The engine cannot serve this model correctly; the message names the model and the reason."""


class CapacityError(ConfigError):
    """The planned memory or devices are not available; the message says what would fit."""


class RequestError(RolloutPoolError, ValueError):
    """One prompt or its sampling parameters are wrong. Fails its own group and nothing else."""


class InputFileError(RolloutPoolError, ValueError):
    """A file the user named cannot be read as what it should be; the message names file and line."""


class OutputFileError(RolloutPoolError, OSError):
    """A file the user named cannot be written."""


class ActorStartError(RolloutPoolError, RuntimeError):
    """A rollout actor did not come up within its deadline; the message says what was missing."""


class NoRoomError(ActorStartError):
    """The cluster had no room for a rollout actor until its deadline; the message says what is missing."""


class ActorLostError(RolloutPoolError, RuntimeError):
    """A rollout actor died more often than ``PoolConfig.max_replays`` allows."""


class QueueFullError(RolloutPoolError, RuntimeError):
    """More groups would wait than ``PoolConfig.max_queued_groups`` allows; nothing of the call was taken."""


class PoolClosedError(RolloutPoolError, RuntimeError):
    """The pool was shut down and takes no more work."""


class WeightSyncError(RolloutPoolError, RuntimeError):
    """New weights were refused or did not arrive; the message names the tensors. The old ones go on."""


class WeightsLostError(RolloutPoolError, RuntimeError):
    """A pool's process was lost and with it newer weights than the checkpoint's; it waits for a sync."""


class VerificationError(RolloutPoolError, RuntimeError):
    """Log-probabilities differ from the teacher-forced forward by more than the tolerance."""
