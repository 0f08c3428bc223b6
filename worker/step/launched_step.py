"""LaunchedStep: a step whose kernels are launched, and whose tokens the device may still compute."""

from __future__ import annotations

from dataclasses import dataclass

from ...proto.errors import RankFailed, in_one_line
from ...proto.step import Logprobs, StepResult
from ..memory.device_to_host import HostCopy
from ..pooling.pooler import LaunchedVectors
from ..sampling.sampler import SampledLogprobs


@dataclass(slots=True)
class LaunchedStep:
    """A launched step of one rank; it is filled in while it is launched.

    Attributes:
        launched: the result, without what the device has still to compute.
        copied: the token ids, and the four tensors of log-probabilities if there are any; None if no row samples, and
            on ranks other than 0.
        logprobs: of the sampled tokens.
        vectors: of the pooled rows whose prompts are complete; None if there are none, and on ranks other than 0.
    """

    launched: StepResult
    copied: HostCopy | None = None
    logprobs: SampledLogprobs | None = None
    vectors: LaunchedVectors | None = None

    def result(self) -> StepResult:
        """Wait until the device has computed the tokens, and return them. On a CPU they are there already.

        Raises:
            RankFailed: a kernel failed.
        """
        result = self.launched
        try:
            if self.vectors is not None:
                result.pooled = self.vectors.wait()
            if self.copied is None:
                return result
            result.token_ids, *columns = self.copied.wait()
        except RuntimeError as error:
            raise RankFailed(
                self.launched.rank, in_one_line(error), self.launched.step_id, "device", is_step_error=True
            ) from error
        if self.logprobs is not None:
            result.logprobs = Logprobs(self.logprobs.index, *columns)
        return result
