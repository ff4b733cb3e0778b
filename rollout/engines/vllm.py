"""vLLM inside the trainer's process, driven step by step so that every response leaves as soon as it is finished."""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from datamodules.common.distributed import world_size
from rollout.engines.checks import check_requests
from rollout.engines.vllm_cpu import keep_generators_of_discarded_tokens
from rollout.engines.vllm_input import read_response, render, sampling_params
from rollout.engines.vllm_settings import VLLMSettings
from rollout.types import GenerateRequest, Response, SampleError


@dataclass(eq=False)
class VLLMEngine(VLLMSettings):
    """An `Engine` around `vllm.LLM`, colocated with the trainer: one process, one device, two models.

    Requests of one prompt share its rendering (rescaling, patches) and, through vLLM's prefix cache, its prompt
    tokens. Prompts are rendered in a background thread while earlier ones generate; how many enter before each
    engine step depends on token counts only, never on timing, so that all ranks of a tensor-parallel group and
    two runs of one seed make the same schedule.

    With `torch.distributed` initialised on more than one rank the engine uses vLLM's external launcher: rank r
    belongs to the tensor-parallel group r // tensor_parallel_size, whose ranks must pass identical requests (see
    `rollout.engines.lockstep`).
    """

    needs_vllm: ClassVar[bool] = True
    """Whether the engine needs vLLM to be installed."""

    _: KW_ONLY
    enable_prefix_caching: bool = True
    """Responses of one prompt share its keys and values."""
    sleep_level: int = 2
    """0 = stay awake, 1 = weights to host memory, 2 = drop them (the next sync brings new ones)."""
    load_weights: bool = True
    """False = start with random weights: saves the read from disk where a sync follows anyway."""
    seed: int = 0
    """The engine's own seed; responses never depend on it, each carries its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if world_size() % self.tensor_parallel_size:
            raise ValueError(
                f"rollout tensor_parallel_size={self.tensor_parallel_size} does not divide the {world_size()} ranks"
            )
        if self.sleep_level not in (0, 1, 2):
            raise ValueError(f"sleep_level={self.sleep_level}; use 0 (stay awake), 1 (weights to host) or 2 (drop)")
        self._sleeps = torch.cuda.is_available() and self.sleep_level > 0
        self._cuda_devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        self._asleep: set[str] = set()
        self.needs_weights = not self.load_weights
        """The engine holds no valid weights, after a level-2 sleep or a start without, until `update_weights`."""
        self._start()

    def _start(self) -> None:
        """Start vLLM in this process, and what the engine needs around it."""
        # The engine must live in this process: weights are handed over as tensors, and ranks step in lock-step.
        self.prepare_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0")
        from vllm import LLM  # reads the environment at its import

        own: dict[str, Any] = {
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_sleep_mode": self._sleeps,
            "load_format": "auto" if self.load_weights else "dummy",
            "seed": self.seed,
        }
        if world_size() > 1:
            own["distributed_executor_backend"] = "external_launcher"
        # Building an engine reseeds the process; the trainer's random state must not notice.
        with _kept_random_state(self._cuda_devices), warnings.catch_warnings():
            # vLLM touches deprecated names of torch.
            warnings.simplefilter("ignore", FutureWarning)
            self.llm = LLM(**self.arguments(**own))
        if not torch.cuda.is_available():
            self.llm.collective_rpc(keep_generators_of_discarded_tokens)
        # vLLM compiles small sampler functions even in eager mode: ten seconds per process on a CPU, for nothing.
        self._stance = partial(torch.compiler.set_stance, "force_eager") if self.enforce_eager else nullcontext
        self._tokenizer = self.llm.get_tokenizer()
        self._tokens_per_step = self.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        # One thread: vLLM's renderer is not meant to be entered twice at a time.
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[str, Response]]:
        """Yield (request_id, response) in the order in which responses finish.

        Raises:
            ValueError: request ids repeat.
            SampleError: a prompt does not fit or cannot be rendered.
            RuntimeError: the engine failed, its prompt ids differ from the processor's, or a response holds a banned
                token. The message names the sample.
        """
        check_requests(requests, self.max_model_len)
        if not requests:
            return
        if self.needs_weights:
            raise RuntimeError("the engine holds no weights since its start or last sleep; call update_weights first")
        self._wake("weights")
        self._wake("kv_cache")
        groups: dict[int, list[GenerateRequest]] = defaultdict(list)
        for request in requests:
            groups[id(request.prompt)].append(request)
        renderer = self.llm.llm_engine.renderer
        pending = [  # rendered once per prompt, not per response
            (members, self._threads.submit(render, renderer, self.family, members[0].prompt))
            for members in groups.values()
        ]
        in_flight: dict[str, GenerateRequest] = {}
        try:
            while pending or in_flight:
                self._admit(pending, in_flight)
                yield from self._step(in_flight)
        finally:
            # Reached early when the consumer stops or something raised: leave an idle engine behind.
            for _, future in pending:
                future.cancel()
            if in_flight:
                self.llm.llm_engine.abort_request(list(in_flight))

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load checkpoint-format weights, tensor by tensor, and drop every cache computed with the old ones."""
        self._wake("weights")
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(weights), "is_checkpoint_format": True}
        )
        self.reset_caches()
        self.needs_weights = False

    def reset_caches(self) -> None:
        """Forget keys and values, vision features and processed inputs."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the engine kept prefix-cache blocks in use while idle; its weights cannot be replaced")
        self.llm.llm_engine.reset_encoder_cache()
        self.llm.llm_engine.reset_mm_cache()

    def sleep(self) -> None:
        """Free the engine's device memory (nothing to do without CUDA or with `sleep_level=0`)."""
        if not self._sleeps or self._asleep:
            return
        # Features and prefixes survive a sleep otherwise: a leak, and stale after the next sync.
        self.reset_caches()
        self.llm.sleep(level=self.sleep_level)
        self._asleep = {"weights", "kv_cache"}
        self.needs_weights = self.sleep_level == 2

    def wake(self) -> None:
        """Bring back the memory of the weights; that of the KV cache follows at the first `generate`.

        Waking in two steps keeps the peak low: while weights are copied there is no KV cache yet.
        """
        self._wake("weights")

    def close(self) -> None:
        """Release the engine and its threads; the process group stays, it belongs to the trainer."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if not hasattr(self, "llm"):
            return
        # vLLM's own shutdown, also run when its client is collected, would destroy the default process group.
        client: Any = self.llm.llm_engine.engine_core
        del self.llm
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        client.engine_core.scheduler.shutdown()
        if world_size() > 1:
            from vllm.distributed.parallel_state import destroy_model_parallel

            # vLLM's own groups and the shared memory behind them, not the trainer's.
            destroy_model_parallel()

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self.llm.wake_up(tags=[tag])
            self._asleep.discard(tag)

    def _admit(self, pending: list[tuple[list[GenerateRequest], Future]], in_flight: dict) -> None:
        """Hand the engine prompts worth one step's tokens, waiting for their rendering."""
        tokens = 0
        while pending and tokens < self._tokens_per_step:
            members, future = pending.pop(0)
            engine_input = future.result()
            tokens += members[0].prompt.num_prompt_tokens
            for request in members:
                try:
                    self.llm.llm_engine.add_request(request.request_id, engine_input, sampling_params(request))
                except Exception as error:  # the sample's id is what the user can act on
                    raise SampleError(request.prompt.uid, f"the engine refuses it: {error}") from error
                in_flight[request.request_id] = request

    def _step(self, in_flight: dict[str, GenerateRequest]) -> Iterator[tuple[str, Response]]:
        """Run one engine step and yield what finished in it."""
        try:
            # vLLM draws from the process's generator too, even for seeded requests; the trainer's must stay put.
            with self._stance(), torch.random.fork_rng(devices=self._cuda_devices):
                outputs = self.llm.llm_engine.step()
        except Exception as error:
            # A failed forward takes every request in flight with it; name them all.
            uids = sorted({request.prompt.uid for request in in_flight.values()})
            raise RuntimeError(f"the engine failed with samples {uids[:8]} ({len(uids)}) in flight: {error}") from error
        for output in outputs:
            if output.finished:
                request = in_flight.pop(output.request_id)
                yield request.request_id, read_response(request, output, self._tokenizer)
        if in_flight and not self.llm.llm_engine.has_unfinished_requests():
            uids = sorted({request.prompt.uid for request in in_flight.values()})
            raise RuntimeError(f"the engine lost {len(in_flight)} requests of samples {uids[:8]}")


@contextmanager
def _kept_random_state(cuda_devices: list[int]) -> Iterator[None]:
    """Restore the random state of Python, NumPy and torch on leaving."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=cuda_devices):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
