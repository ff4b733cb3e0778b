"""transformers as a generator: slower than vLLM, no extra package, the same interface and the same answers."""

from __future__ import annotations

import inspect
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engines.checks import check_prompt_ids, check_requests, check_response_ids
from rollout.model_folder import model_folder
from rollout.positions import chain_positions
from rollout.tokens import seconds_per_grid
from rollout.types import GenerateRequest, Response, SampleError

if TYPE_CHECKING:
    import torch

    from datamodules.types import PreparedSample

log = logging.getLogger(__name__)

_LOADING = threading.Lock()


class HFEngine:
    """An `Engine` with its own copy of the model and its own sampling loop.

    The responses to one prompt are sampled as one batch behind one pass over the prompt; every response draws from
    its own generator, so that its tokens do not depend on its neighbours.

    Args:
        model_path: Hugging Face folder or hub name.
        dtype: precision of the copy ("float32", "bfloat16", "float16").
        device: where the copy lives; None = the current CUDA device, else CPU.
        max_model_len: longest prompt + response in tokens; None = no limit.
        attn_implementation: transformers' attention ("sdpa", "eager", "flash_attention_2").
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        device: str | None = None,
        max_model_len: int | None = None,
        attn_implementation: str = "sdpa",
    ) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        model_path = model_folder(model_path)
        self.max_model_len = max_model_len
        self.needs_weights = False
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # transformers patches its own classes while it loads; two threads at once leave the patches in place, and every
        # later model of the process has untied weights.
        with _LOADING:
            self._processor = AutoProcessor.from_pretrained(model_path)
            self._model = AutoModelForImageTextToText.from_pretrained(
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
        import torch

        own = dict(self._model.named_parameters(remove_duplicate=False))
        missing = {name for name, _ in self._model.named_parameters()}
        with torch.no_grad():
            for streamed, value in weights:
                name = _own_name(streamed, own)
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
        import torch

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
        import torch

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
        if "second_per_grid_ts" in inputs:
            inputs["second_per_grid_ts"] = torch.tensor(seconds_per_grid(self._processor, prompt))
        return {key: value.to(self._device) for key, value in inputs.items() if hasattr(value, "to")}

    def _positions(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """M-RoPE positions int64 [3, L] of one prompt, as vLLM computes them; None for models with plain positions."""
        import torch

        body = self._model.base_model
        if not hasattr(body, "get_rope_index"):
            return None
        kinds = inputs.get("mm_token_type_ids")
        if kinds is None or not any(key.endswith("grid_thw") for key in inputs):
            return torch.arange(inputs["input_ids"].shape[1], device=self._device).expand(3, -1)
        known = inspect.signature(body.get_rope_index).parameters
        positions, _ = body.get_rope_index(**{key: value for key, value in inputs.items() if key in known})
        return chain_positions(positions[:, 0], kinds[0])

    def _generate_group(self, members: list[GenerateRequest]) -> Iterator[tuple[str, Response]]:
        """One pass over the prompt, then all its responses token by token as one batch."""
        import torch

        with torch.inference_mode():
            inputs = self._inputs(members[0].prompt)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            positions = self._positions(inputs)
            if positions is not None:
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
                step = torch.tensor(tokens, device=self._device)[:, None]
                place = None
                if positions is not None:
                    place = torch.full((3, len(rows), 1), int(positions.max()) + decoded, device=self._device)
                logits = self._decode(step, place, cache)
                decoded += 1
        for row in rows:
            yield row.request.request_id, self._response(row)

    def _decode(self, tokens: torch.Tensor, positions: torch.Tensor | None, cache: Any) -> torch.Tensor:
        """Logits float32 [rows, vocabulary] after one more token per row."""
        options = {} if positions is None else {"position_ids": positions}
        output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, **options)
        return output.logits[:, -1].float()

    def _response(self, row: _Row) -> Response:
        import numpy as np

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
        import torch

        self.request = request
        self.generator = torch.Generator(device=device).manual_seed(request.seed)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stops = frozenset(request.sampling.stop_ids)
        self.finished = False

    def sample(self, logits: torch.Tensor) -> int:
        """Draw the next token from `logits` float32 [vocabulary]; a finished row repeats its last token unrecorded."""
        import torch

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


def _own_name(name: str, own: Mapping[str, Any]) -> str:
    """transformers' name of a checkpoint's weight: early Qwen checkpoints call the tower `visual`, the text `model`."""
    candidates = (name, f"model.{name}", name.replace("model.", "model.language_model.", 1))
    return next((candidate for candidate in candidates if candidate in own), name)


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
    import torch

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
