"""A GPU that is not there: tensors on ``cuda:0`` that hold host memory, with a GPU's rules and without its kernels.

Ops on its tensors run at once on the CPU and give real numbers; Triton kernels run in Triton's interpreter. These
mistakes, which only a GPU would show otherwise, raise an error or leave wrong numbers:

- an op that mixes tensors on the host and on the device;
- a copy of memory that is not pinned, which makes the host wait (`num_syncs` counts these, reads of a value, and
  `synchronize`), or a pinned source that changes before its copy has run;
- a result on the host that is read before its event: its memory holds garbage until then;
- a tensor used on a stream that does not wait for the stream that wrote it, or written where another still reads it;
- anything in a recording that waits for the device; tensors that a recording allocates hold garbage until a replay.
"""

from .current import current_gpu, is_installed
from .device_tensor import DeviceTensor
from .gpu import StandInGpu
from .installation import installed
from .streams import Stream, StreamError

__all__ = [
    "DeviceTensor",
    "StandInGpu",
    "Stream",
    "StreamError",
    "current_gpu",
    "installed",
    "is_installed",
]
