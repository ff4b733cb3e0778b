"""vLLM's AsyncLLM as a replica: the engine core runs in a process of its own and dies with the evaluation."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eval.engine.errors import EngineLostError
from rollout.engines.checks import check_requests
from rollout.engines.vllm_input import fixed_options, read_response, render, sampling_params
from rollout.model_folder import model_folder
from rollout.types import GenerateRequest, Response

log = logging.getLogger(__name__)


class AsyncLLMReplica:
    """A `Replica` around `vllm.v1.engine.async_llm.AsyncLLM`.

    Rendering (rescaling, patches) runs in a thread while the engine core, another process, prefills and decodes what
    came before.

    Args:
        model_path: Hugging Face folder or hub name.
        dtype: engine precision.
        max_model_len: longest prompt + response in tokens.
        tensor_parallel_size: devices of this replica.
        gpu_memory_utilization: share of device memory (CUDA).
        kv_cache_gib: KV cache size; None = from `gpu_memory_utilization` (1 on CPU).
        max_num_seqs: most responses in flight inside the engine.
        max_num_batched_tokens: tokens per engine step; longer prompts are prefilled in chunks; None = vLLM's default.
        limit_images: most images per prompt.
        limit_videos: most videos per prompt.
        enforce_eager: no CUDA graphs, no compilation.
        quiet: keep vLLM's logger at errors.
        extra_options: more of `AsyncEngineArgs`.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "bfloat16",
        max_model_len: int = 262144,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        kv_cache_gib: float | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        limit_images: int = 64,
        limit_videos: int = 512,
        enforce_eager: bool = False,
        quiet: bool = True,
        extra_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model_path = model_folder(model_path)
        self._max_model_len = max_model_len
        self._kv_cache_gib, self._quiet = kv_cache_gib, quiet
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "limit_mm_per_prompt": {"image": limit_images, "video": limit_videos},
            "enforce_eager": enforce_eager,
            "disable_log_stats": True,
            "enable_log_requests": False,
            "worker_extension_cls": "eval.engine.vllm_replica.WorkerExtension",
            **(extra_options or {}),
        }
        self._engine: Any = None
        # One thread: vLLM's renderer is not meant to be entered twice at a time.
        self._renderer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._names = itertools.count()

    async def start(self) -> None:
        """Load the model. Takes seconds to minutes, during which the event loop stands still."""
        import torch
        from transformers import AutoProcessor

        cuda = torch.cuda.is_available()
        _prepare_environment(self._kv_cache_gib, self._quiet, cuda)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = fixed_options(self._model_path, self._kv_cache_gib) | self._options
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(self._model_path), **options))
        await self._engine.collective_rpc("evaluation_setup", args=(os.getpid(),))
        self._tokenizer = self._engine.get_tokenizer()
        self._processor = AutoProcessor.from_pretrained(self._model_path)

    async def generate(self, request: GenerateRequest) -> Response:
        """Answer one request.

        Raises:
            SampleError: the prompt does not fit or cannot be rendered.
            EngineLostError: the engine core is gone.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        check_requests([request], self._max_model_len)
        loop = asyncio.get_running_loop()
        engine_input = await loop.run_in_executor(
            self._renderer, render, self._engine.renderer, self._processor, request.prompt
        )
        params = _final_only(sampling_params(request))
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
        self._renderer.shutdown(wait=False, cancel_futures=True)
        if engine is not None:
            engine.shutdown()


class WorkerExtension:
    """What vLLM's worker gets in addition; vLLM mixes this class into its own."""

    def evaluation_setup(self, evaluation: int) -> None:
        """End with the evaluation (a process id), and sample on CPU as the colocated engine does."""
        import threading

        import torch

        # The worker is the engine core itself, or its child.
        core = os.getppid() if os.getppid() != evaluation else os.getpid()
        threading.Thread(target=_end_with, args=(evaluation, core), daemon=True, name="evaluation-watch").start()
        if not torch.cuda.is_available():
            from rollout.engines.vllm_cpu import keep_generators_of_discarded_tokens

            keep_generators_of_discarded_tokens(self)
            # Small sampler functions are compiled even in eager mode: ten seconds per process, for nothing.
            torch.compiler.set_stance("force_eager")


def _end_with(evaluation: int, core: int) -> None:
    """Wait for the end of the evaluation, however it ends, then end the engine core and this process.

    vLLM's core does not notice that its parent was killed; it would keep the device's memory.
    """
    import select
    import signal

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


def _final_only(params: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind

    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _prepare_environment(kv_cache_gib: float | None, quiet: bool, cuda: bool) -> None:
    """Set what vLLM reads at its import and hands to its process."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # A forked core would inherit our threads' locks and the run folder's.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if quiet:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        logging.getLogger("vllm").setLevel(logging.ERROR)
    if not cuda:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_cache_gib or 1)))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
