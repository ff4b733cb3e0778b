"""transformers as a generator: slower than vLLM, no extra package, the same interface and the same answers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollout.engines.checks import check_prompt_ids, check_requests, check_response_ids
from rollout.model_folder import model_folder
from rollout.types import EngineFamily, GenerateRequest, Response, SampleError

if TYPE_CHECKING:
    from datamodules.types import PreparedSample

_LOADING = threading.Lock()


class HFEngine:
    """An `Engine` with its own copy of the model and its own sampling loop.

    The responses to one prompt are sampled as one batch behind one pass over the prompt; every response draws from
    its own generator, so that its tokens do not depend on its neighbours.

    Args:
        model_path: Hugging Face folder or hub name.
        family: the model's family: positions and checkpoint names.
        dtype: precision of the copy ("float32", "bfloat16", "float16").
        device: where the copy lives; None = the current CUDA device, else CPU.
        max_model_len: longest prompt + response in tokens; None = no limit.
        attn_implementation: transformers' attention ("sdpa", "eager", "flash_attention_2").
    """

    def __init__(
        self,
        model_path: str | Path,
        family: EngineFamily,
        *,
        dtype: str = "float32",
        device: str | None = None,
        max_model_len: int | None = None,
        attn_implementation: str = "sdpa",
    ) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        model_path = model_folder(model_path)
        self._family = family.open(str(model_path))
        self.max_model_len = max_model_len
        self.needs_weights = False
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # transformers patches its own classes while it loads; two threads at once leave the patches in place, and every
        # later model of the process has untied weights.
        with _LOADING:
            self._processor = AutoProcessor.from_pretrained(model_path)
            # transformers' own types of `to` and `base_model` are not usable.
            self._model: Any = AutoModelForImageTextToText.from_pretrained(
                model_path, dtype=getattr(torch, dtype), attn_implementation=attn_implementation
            )
        self._model.requires_grad_(False).eval().to(self._device)

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[str, Response]]:
        """Yield (request_id, response), prompt by prompt.

        Raises:
            ValueError: request ids repeat.
            SampleError: a prompt does not fit or cannot be rendered.
            RuntimeError: the processor's ids differ from the prepared ones, or a response holds a banned token.
        """
        check_requests(requests, self.max_model_len)
        groups: dict[int, list[GenerateRequest]] = defaultdict(list)
        for request in requests:
            groups[id(request.prompt)].append(request)
        for members in groups.values():
            yield from self._generate_group(members)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy checkpoint-format weights into the model.

        Raises:
            RuntimeError: a name is unknown, a shape differs, or weights are missing.
        """
        named = self._model.named_parameters
        own = {self._family.to_checkpoint_name(name): value for name, value in named(remove_duplicate=False)}
        missing = {self._family.to_checkpoint_name(name) for name, _ in named()}
        with torch.no_grad():
            for name, value in weights:
                target = own.get(name)
                if target is None or target.shape != value.shape:
                    shape = None if target is None else tuple(target.shape)
                    raise RuntimeError(f"weight {name} {tuple(value.shape)} does not fit the engine's model ({shape})")
                target.copy_(value)
                missing.discard(name)
        if missing:
            raise RuntimeError(f"weights missing in the engine after the sync: {sorted(missing)[:5]} ({len(missing)})")

    def sleep(self) -> None:
        """Move the copy to host memory (nothing to do on CPU)."""
        if self._device.type == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring the copy back to its device."""
        self._model.to(self._device)

    def close(self) -> None:
        """Release the model."""
        self._model = None

    def _inputs(self, prompt: PreparedSample) -> dict[str, Any]:
        """The processor's tensors of one prompt on the model's device, with its token ids checked."""
        options: dict[str, Any] = {}
        if prompt.images:
            options["images"] = [torch.from_numpy(image.pixels.copy()) for image in prompt.images]
        if prompt.videos:
            options["videos"] = [torch.from_numpy(video.frames.copy()) for video in prompt.videos]
            options["video_metadata"] = [video.metadata for video in prompt.videos]
            options["do_sample_frames"] = False
        if not options:
            return {"input_ids": torch.tensor([prompt.expanded_ids], device=self._device)}
        try:
            inputs = self._processor(text=[prompt.prompt_text], do_resize=False, return_tensors="pt", **options)
        except Exception as error:  # whatever the processor raises, the user needs to know which sample it was
            raise SampleError(prompt.uid, f"the processor cannot render the prompt: {error}") from error
        check_prompt_ids(prompt, inputs["input_ids"][0].tolist())
        return {key: value.to(self._device) for key, value in inputs.items() if hasattr(value, "to")}

    def _positions(self, prompt: PreparedSample) -> torch.Tensor:
        """M-RoPE positions int64 [3, L] of one prompt, as the trainer and vLLM compute them."""
        return self._family.positions(
            torch.tensor(prompt.expanded_ids),
            [image.grid for image in prompt.images],
            [video.grid for video in prompt.videos],
            [video.metadata.sampled_fps for video in prompt.videos],
        ).to(self._device)

    def _generate_group(self, members: list[GenerateRequest]) -> Iterator[tuple[str, Response]]:
        """One pass over the prompt, then all its responses token by token as one batch."""
        with torch.inference_mode():
            inputs = self._inputs(members[0].prompt)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            positions = self._positions(members[0].prompt)
            inputs["position_ids"] = positions[:, None]
            output = self._model(**inputs, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            # One copy per response; unlike batch_repeat_interleave it exists for linear-attention states, too.
            cache.reorder_cache(torch.zeros(len(members), dtype=torch.int64, device=self._device))
            rows = [_Row(request, self._device) for request in members]
            logits = output.logits[:, -1].float().expand(len(members), -1)
            decoded = 1
            while True:
                tokens = [row.sample(logits[i]) for i, row in enumerate(rows)]
                if all(row.finished for row in rows):
                    break
                step = self._model(
                    input_ids=torch.tensor(tokens, device=self._device)[:, None],
                    position_ids=torch.full((3, len(rows), 1), int(positions.max()) + decoded, device=self._device),
                    past_key_values=cache,
                    use_cache=True,
                )
                logits = step.logits[:, -1].float()
                decoded += 1
        for row in rows:
            yield row.request.request_id, self._response(row)

    def _response(self, row: _Row) -> Response:
        check_response_ids(row.request, row.tokens)
        return Response(
            token_ids=np.asarray(row.tokens, dtype=np.int32),
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            finish_reason="stop" if row.tokens[-1] in row.stops else "length",
            text=self._processor.tokenizer.decode(row.tokens, skip_special_tokens=True),
            seed=row.request.seed,
            prompt_token_ids=row.request.prompt.expanded_ids,
        )


class _Row:
    """One response in the making: its generator, tokens and log-probs."""

    def __init__(self, request: GenerateRequest, device: torch.device) -> None:
        self.request = request
        self.generator = torch.Generator(device=device).manual_seed(request.seed)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stops = frozenset(request.sampling.stop_ids)
        self.finished = False

    def sample(self, logits: torch.Tensor) -> int:
        """Draw the next token from `logits` float32 [vocabulary]; a finished row repeats its last token unrecorded."""
        if self.finished:
            return self.tokens[-1]
        spec = self.request.sampling
        logprobs = processed_logprobs(
            logits, spec.temperature, spec.banned_ids, top_k=spec.top_k, top_p=spec.top_p if spec.temperature else 1.0
        )
        if spec.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self.generator))
        self.tokens.append(token)
        self.logprobs.append(float(logprobs[token]))
        self.finished = token in self.stops or len(self.tokens) == spec.max_tokens
        return token


def processed_logprobs(
    logits: torch.Tensor,
    temperature: float,
    banned_ids: Sequence[int] = (),
    top_k: int = -1,
    top_p: float = 1.0,
) -> torch.Tensor:
    """Log-probabilities of the distribution that is sampled: ban, temperature, top-k, top-p, in this order.

    Greedy decoding (temperature 0) reports log-probs at temperature 1, as vLLM does.

    Args:
        logits: float32 [..., vocabulary].
    """
    logits = logits.clone()
    if banned_ids:
        logits[..., list(banned_ids)] = float("-inf")
    if temperature > 0:
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1] and temperature > 0:
        threshold = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1)
        # A token goes when the mass of it and everything less likely is at most 1 - top_p; the best one stays.
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        drop[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float("-inf"))
    return logits.log_softmax(-1)
