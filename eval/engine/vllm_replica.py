"""vLLM's AsyncLLM as a replica: the engine core runs in a process of its own and dies with the evaluation."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from eval.engine.errors import EngineLostError
from rollout.engines.checks import check_requests
from rollout.engines.vllm_cpu import keep_generators_of_discarded_tokens
from rollout.engines.vllm_input import read_response, render, sampling_params
from rollout.engines.vllm_settings import VLLMSettings
from rollout.types import GenerateRequest, Response

log = logging.getLogger(__name__)


@dataclass(eq=False)
class AsyncLLMReplica(VLLMSettings):
    """A `Replica` around `vllm.v1.engine.async_llm.AsyncLLM`.

    Rendering (rescaling, patches) runs in a thread while the engine core, another process, prefills and decodes what
    came before.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine: Any = None
        # One thread: vLLM's renderer is not meant to be entered twice at a time.
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._names = itertools.count()

    async def start(self) -> None:
        """Load the model. Takes seconds to minutes, during which the event loop stands still."""
        # A forked core would inherit our threads' locks and the run folder's.
        self.prepare_environment(VLLM_WORKER_MULTIPROC_METHOD="spawn")
        from vllm.engine.arg_utils import AsyncEngineArgs  # vLLM reads the environment at its import
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = self.arguments(
            disable_log_stats=True,
            enable_log_requests=False,
            worker_extension_cls="eval.engine.vllm_replica.WorkerExtension",
        )
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        await self._engine.collective_rpc("evaluation_setup", args=(os.getpid(),))
        self._tokenizer = self._engine.get_tokenizer()

    async def generate(self, request: GenerateRequest) -> Response:
        """Answer one request.

        Raises:
            SampleError: the prompt does not fit or cannot be rendered.
            EngineLostError: the engine core is gone.
        """
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        check_requests([request], self.max_model_len)
        loop = asyncio.get_running_loop()
        engine_input = await loop.run_in_executor(
            self._threads, render, self._engine.renderer, self.family, request.prompt
        )
        params = sampling_params(request)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        # A repeated request must not meet its own, aborted predecessor.
        name = f"{request.request_id}:{next(self._names)}"
        last = None
        try:
            async for output in self._engine.generate(engine_input, params, name):
                last = output
        except EngineDeadError as error:
            raise EngineLostError(f"the engine's process ended ({error})") from error
        if last is None or not last.finished:
            raise RuntimeError(f"sample {request.prompt.uid}: the engine ended the request without an answer")
        return read_response(request, last, self._tokenizer)

    def close(self) -> None:
        """End the engine's process."""
        engine, self._engine = self._engine, None
        self._threads.shutdown(wait=False, cancel_futures=True)
        if engine is not None:
            engine.shutdown()


class WorkerExtension:
    """What vLLM's worker gets in addition; vLLM mixes this class into its own."""

    def evaluation_setup(self, evaluation: int) -> None:
        """End with the evaluation (a process id), and sample on CPU as the colocated engine does."""
        # The worker is the engine core itself, or its child.
        core = os.getppid() if os.getppid() != evaluation else os.getpid()
        threading.Thread(target=_end_with, args=(evaluation, core), daemon=True, name="evaluation-watch").start()
        if not torch.cuda.is_available():
            keep_generators_of_discarded_tokens(self)
            # Small sampler functions are compiled even in eager mode: ten seconds per process, for nothing.
            torch.compiler.set_stance("force_eager")


def _end_with(evaluation: int, core: int) -> None:
    """Wait for the end of the evaluation, however it ends, then end the engine core and this process.

    vLLM's core does not notice that its parent was killed; it would keep the device's memory.
    """
    try:
        descriptor = os.pidfd_open(evaluation)
    except (ProcessLookupError, AttributeError):  # ended already; or no Linux
        if hasattr(os, "pidfd_open"):
            os.kill(core, signal.SIGKILL)
        return
    select.select([descriptor], [], [])
    if core != os.getpid():
        try:
            os.kill(core, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("the engine core had ended before")
    os.kill(os.getpid(), signal.SIGKILL)
