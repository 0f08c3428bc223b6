"""Models that read images compute what transformers computes, however their prompts are scheduled."""

from __future__ import annotations

import inspect
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_models import SCHEMES, Scheme, write_quantized
from quick_cases import diagonal, slow_except
from ranked_driver import RankedDriver
from safetensors.torch import load_file, save_file
from vision_kinds import VISION_KINDS
from vision_models import (
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    VisionPrompt,
    VisionReference,
    make_prompt,
    random_image,
    save_model,
)

from quire.kernels.linear import PackedWeight
from quire.proto.block_tables import outputs_digest
from quire.proto.config import EngineConfig
from quire.proto.engine_command import Action, EngineCommand
from quire.proto.media import MediaTensors, layout_of
from quire.proto.model.vision import read_vision
from quire.proto.step import WHOLE_IMAGE, EncoderInput, RowLogitsProcessors, RowSampling, StepPlan
from quire.worker.models.vision.parts import Encoding
from quire.worker.rank.encoder_outputs import EncoderOutputs
from quire.worker.step.media_rows import Piece, StepMedia
from quire.worker.weights import linear_weight

# Width and height, one of them far from square.
SIZES = ((32, 32), (80, 16), (20, 44), (9, 70))
NUM_TOKENS = 6
# Kinds of three layers and more, with grid positions, deep features, tokens that attend to each other, states, and
# layers with two caches.
TYPICAL = ("qwen2_5_vl", "qwen3_vl_moe", "gemma3", "qwen3_5", "pixtral", "muse_spark", "minimax_m3")
# transformers would look for the image of a generated image token.
SAMPLING: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "logit_bias": {IMAGE_TOKEN: -100.0, VIDEO_TOKEN: -100.0},
}


def encode_whole(encoding: Encoding) -> torch.Tensor:
    """Return the embeddings of an image, computed at once."""
    while True:
        try:
            next(encoding)
        except StopIteration as end:
            embeddings: torch.Tensor = end.value
            return embeddings


class Model:
    """A small random model, and prompts for it: with no image, one, several, and one twice."""

    def __init__(self, kind: str, folder: Path, seed: int) -> None:
        self.folder = folder
        processor = save_model(VISION_KINDS[kind], folder, seed)
        self.reference = VisionReference(folder)
        rng = random.Random(seed)
        images = [random_image(rng, *size) for size in SIZES]

        def prompt(*chosen: int) -> VisionPrompt:
            lens = [rng.randrange(1, 12) for _ in range(len(chosen) + 1)]
            own = [images[each] for each in chosen]
            return make_prompt(VISION_KINDS[kind], processor, rng, own, lens, self.reference)

        self.prompts = [prompt(), prompt(0), prompt(1, 2, 3), prompt(2, 2), prompt(3)]
        self._kind, self._processor = VISION_KINDS[kind], processor

    def same_shape(self, prompt: VisionPrompt) -> VisionPrompt:
        """Return a prompt with the same tokens as one with the first image, and another image."""
        item = prompt.media[0]
        image = random_image(random.Random(99), *SIZES[0])
        start, end = item.start - 1, item.end + 1
        other = make_prompt(
            self._kind, self._processor, random.Random(0), [image], [start, 0], self.reference
        )
        tokens = prompt.token_ids[:start] + other.token_ids[start:] + prompt.token_ids[end:]
        return replace(other, token_ids=tokens)

    def step_tokens(self, wanted: int) -> int:
        """Return how many tokens a step computes: `wanted`, or as many as the largest piece that may not be cut."""
        if self._kind.sees_whole_prompt:
            return max(wanted, *(len(prompt.token_ids) for prompt in self.prompts))
        vision = read_vision("it", self._kind.architecture, self.reference.model.config.to_dict())
        if vision is None or vision.cuts_images:
            return wanted
        return max(wanted, *(item.num_tokens for prompt in self.prompts for item in prompt.media))

    def encoded(self) -> Iterator[tuple[MediaTensors, torch.Tensor]]:
        """Yield the tensors of images and what transformers makes of them."""
        for prompt in self.prompts[1:3]:
            with torch.inference_mode():
                embeddings = self.reference.encode(prompt)
            yield from zip((prompt.tensors[item.digest] for item in prompt.media), embeddings, strict=True)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: Any) -> Any:
    """`model_of(kind, seed) -> Model`, each made once."""
    made: dict[tuple[str, int], Model] = {}

    def make(kind: str, seed: int = 0) -> Model:
        if (kind, seed) not in made:
            made[kind, seed] = Model(kind, tmp_path_factory.mktemp(f"{kind}-{seed}"), seed)
        return made[kind, seed]

    return make


def run(
    model: Model,
    engine: Any,
    prompts: list[VisionPrompt],
    *,
    num_blocks: int = 128,
    num_tokens: int = NUM_TOKENS,
    config: EngineConfig | None = None,
    reference: VisionReference | None = None,
) -> RankedDriver:
    """Run prompts together, and compare the outputs with transformers."""
    config = engine.config if config is None else config
    driver = RankedDriver(config.with_num_blocks(num_blocks), engine.step, engine.take_media)
    for prompt in prompts:
        driver.images.update(prompt.tensors)
    for handle, prompt in enumerate(prompts):
        rejected = driver.add(
            handle, prompt.token_ids, media=prompt.media, **SAMPLING | {"max_tokens": num_tokens}
        )
        assert rejected is None, rejected
    driver.run(depth=2)
    driver.empty_ranks()
    for handle, prompt in enumerate(prompts):
        assert len(driver.outputs[handle]) == num_tokens, driver.finishes[handle]
        (reference or model.reference).check_greedy(prompt, driver.outputs[handle])
    return driver


@pytest.mark.parametrize("seed", slow_except([0], range(5)))
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_images_give_the_tokens_of_transformers(
    kind: str, seed: int, model_of: Any, make_engine: Any
) -> None:
    model = model_of(kind, seed)
    run(model, make_engine(model.folder, max_model_len=1024, num_blocks=256), model.prompts)


@pytest.mark.parametrize(
    ("kind", "tp"),
    slow_except(
        [(kind, 4 if kind in TYPICAL else 2) for kind in VISION_KINDS], product(VISION_KINDS, (2, 4))
    ),
)
def test_ranks_share_a_model_that_reads_images(kind: str, tp: int, model_of: Any, make_engine: Any) -> None:
    model = model_of(kind)
    run(model, make_engine(model.folder, tp, max_model_len=1024, num_blocks=256), model.prompts)


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_ranks_share_the_layers_of_an_encoder(
    kind: str, model_of: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or hold them whole, if they are told so, or if heads cannot be divided; as `quire fit` counts them."""
    monkeypatch.setattr(linear_weight, "pack", PackedWeight)  # without numbers that pad rows
    model, held = model_of(kind), {}
    for mode in ("weights", "data"):
        engine = make_engine(model.folder, 2, max_model_len=1024, num_blocks=256, mm_encoder_tp_mode=mode)
        if mode == "data" and kind in TYPICAL:
            run(model, engine, model.prompts)
        encoders = [runner.memory.loaded.encoder for runner in engine.runners]
        held[mode] = {count_numbers(encoder) for encoder in encoders}
        for tensors, expected in model.encoded():
            on_ranks = {name: torch.from_numpy(each.copy()) for name, each in tensors.items()}
            found = engine.on_all(partial(_encode_alone, on_ranks), encoders)
            assert torch.equal(*found)
            torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    vision = engine.config.model.vision
    (shared,), (whole,) = held["weights"], held["data"]
    assert whole - shared == vision.num_parameters - vision.rank_parameters(2)
    assert (whole == shared) == (not vision.layers[0].is_divisible)


def count_numbers(encoder: object) -> int:
    """Return the numbers of all tensors that an object holds."""
    found, left = dict[int, torch.Tensor](), [encoder]
    seen = set[int]()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found[each.untyped_storage().data_ptr()] = each
        elif isinstance(each, (list, tuple)):
            left.extend(each)
        elif isinstance(each, dict):
            left.extend(each.values())
        elif type(each).__module__.startswith("quire."):
            slots = [name for base in type(each).__mro__ for name in getattr(base, "__slots__", ())]
            left.extend(getattr(each, name) for name in slots if hasattr(each, name))
            left.extend(getattr(each, "__dict__", {}).values())
        elif inspect.ismethod(each):  # of a norm
            left.append(each.__self__)
        elif inspect.isfunction(each):
            left.extend(cell.cell_contents for cell in each.__closure__ or ())
    return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in found.values())


def _encode_alone(tensors: Any, encoder: Any) -> torch.Tensor:
    with torch.inference_mode():
        return encode_whole(encoder.encode(tensors))


@pytest.mark.parametrize(("kind", "tp"), diagonal(TYPICAL, (1, 2)))
def test_the_first_stage_encodes_for_all(kind: str, tp: int, model_of: Any, make_engine: Any) -> None:
    model = model_of(kind)
    most = model.step_tokens(7)
    engine = make_engine(
        model.folder, tp, pp=2, max_model_len=1024, num_blocks=256, max_num_batched_tokens=most, block_size=4
    )
    run(model, engine, model.prompts, num_blocks=192)
    encoders = [runner.memory.loaded.encoder is not None for runner in engine.runners]
    assert encoders == [True] * tp + [False] * tp


def test_ranks_attend_for_their_own_sequences_in_layers_that_share_latents(
    model_of: Any, make_engine: Any
) -> None:
    model = model_of("mistral_large4")
    engine = make_engine(
        model.folder,
        2,
        max_model_len=1024,
        num_blocks=256,
        max_num_batched_tokens=32,
        enable_dp_attention=True,
    )
    run(model, engine, model.prompts)


@pytest.mark.parametrize(
    "kind",
    slow_except(
        [kind for kind, own in VISION_KINDS.items() if kind in TYPICAL or own.sees_whole_prompt], VISION_KINDS
    ),
)
def test_chunks_may_end_within_an_image(kind: str, model_of: Any, make_engine: Any) -> None:
    model = model_of(kind)
    most = model.step_tokens(7)
    engine = make_engine(
        model.folder, max_model_len=1024, num_blocks=256, max_num_batched_tokens=most, block_size=4
    )
    driver = run(model, engine, model.prompts, num_blocks=192)
    rows, places, is_cut = {}, {}, False
    for plan in driver.plans:
        for sequence in plan.new:
            rows[sequence.row], places[sequence.row] = sequence, sequence.num_computed_tokens
        for row, length in zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True):
            places[row] += length
            is_cut = is_cut or any(item.start < places[row] < item.end for item in rows[row].media)
    assert is_cut == (engine.config.model.vision.cuts_images and not VISION_KINDS[kind].sees_whole_prompt)


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_a_prefix_with_an_image_is_found_with_that_image_only(
    kind: str, model_of: Any, make_engine: Any
) -> None:
    model = model_of(kind)
    engine = make_engine(model.folder, max_model_len=1024, num_blocks=256, block_size=4)
    driver = RankedDriver(engine.config.with_num_blocks(192), engine.step, engine.take_media)
    first, other = model.prompts[1], model.same_shape(model.prompts[1])
    assert first.token_ids == other.token_ids
    num_computed = []
    for handle, prompt in enumerate((first, other, first, other)):
        driver.images.update(prompt.tensors)
        driver.add(handle, prompt.token_ids, media=prompt.media, **SAMPLING)
        driver.run()
        num_computed.append(driver.finishes[handle].num_cached_tokens)
        model.reference.check_greedy(prompt, driver.outputs[handle])
    end = first.media[0].end
    assert num_computed[1] <= first.media[0].start
    assert min(num_computed[2:]) >= end // 4 * 4
    assert len(driver.asked) == 2  # a cached prefix needs no image
    driver.empty_ranks()


@pytest.mark.parametrize("kind", slow_except(TYPICAL, VISION_KINDS))
def test_preempted_prompts_and_small_caches_change_no_token(
    kind: str, model_of: Any, make_engine: Any
) -> None:
    model = model_of(kind)
    most = model.step_tokens(16)
    engine = make_engine(
        model.folder, max_model_len=1024, num_blocks=256, max_num_batched_tokens=most, block_size=4
    )
    row_bytes = engine.config.encoder_row_bytes
    num_rows = 192 if VISION_KINDS[kind].sees_whole_prompt else 9
    cache = replace(engine.config.cache, encoder_cache_memory=num_rows * row_bytes)
    longest = max(len(prompt.token_ids) for prompt in model.prompts) + (num_tokens := 24)
    least = next(n for n in count(2) if engine.config.with_num_blocks(n).max_servable_tokens >= longest)
    config = replace(engine.config, cache=cache)
    # The prompts without images run beside those that wait for theirs.
    prompts = [*model.prompts * 2, *model.prompts[:1] * 4]
    driver = run(model, engine, prompts, num_blocks=least + 4, num_tokens=num_tokens, config=config)
    assert driver.scheduler.stats.num_preemptions
    # Those of a prompt that is computed at once are not needed again: another one that is equal shares its blocks.
    fewest = 5 if VISION_KINDS[kind].sees_whole_prompt else 6
    assert driver.scheduler.media.cache.num_encoded > fewest


@pytest.mark.parametrize("seed", slow_except([0], range(5)))
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_encoder_outputs_are_those_of_transformers(
    kind: str, seed: int, model_of: Any, make_engine: Any
) -> None:
    model = model_of(kind, seed)
    engine = make_engine(model.folder, max_model_len=1024, num_blocks=256)
    encoder = engine.runners[0].memory.loaded.encoder
    num_parameters = model.reference.num_encoder_parameters(model.prompts[1], VISION_KINDS[kind].unreached)
    assert engine.config.model.vision.num_parameters == num_parameters
    for tensors, expected in model.encoded():
        with torch.inference_mode():
            ours = encode_whole(
                encoder.encode({name: torch.from_numpy(each.copy()) for name, each in tensors.items()})
            )
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_tiles_of_many_patches_are_read_by_more_queries(model_of: Any, make_engine: Any) -> None:
    """In DeepSeek-OCR 2, whose learned positions and distances are resampled to these tiles."""
    model = model_of("deepseek_ocr2")
    engine = make_engine(model.folder, max_model_len=1024, num_blocks=256)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(count, 3, side, side, generator=generator)
        for name, count, side in (("pixel_values", 1, 204), ("pixel_values_local", 2, 60))
    }
    with torch.inference_mode():
        (expected,) = model.reference.encode(
            VisionPrompt([], (), {}, tensors | {"num_local_patches": torch.tensor([2])})
        )
        ours = encode_whole(engine.runners[0].memory.loaded.encoder.encode(tensors))
    assert len(ours) == 2 * 144 + 256 + 1
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_images_are_encoded_alike_in_any_parts(kind: str, model_of: Any, make_engine: Any) -> None:
    model = model_of(kind)
    engine = make_engine(model.folder, max_model_len=1024, num_blocks=256)
    encoder = engine.runners[0].memory.loaded.encoder
    for media_id, (tensors, _) in enumerate(model.encoded()):
        on_device = {name: torch.from_numpy(each.copy()) for name, each in tensors.items()}
        with torch.inference_mode():
            whole = encode_whole(encoder.encode(on_device))
            done = list(encoder.encode(on_device))
        assert done == sorted(done)
        assert len(done) > 2
        assert done[-1] == pytest.approx(1.0)
        data = b"".join(each.tobytes() for each in tensors.values())
        outputs = EncoderOutputs(engine.config.model.vision, torch.device("cpu"))
        outputs.take(EncoderInput(media_id, layout_of(tensors), data))
        for share in (1, WHOLE_IMAGE // 3, WHOLE_IMAGE // 2, WHOLE_IMAGE):
            encodes, shares = (np.array([each], np.int32) for each in (media_id, share))
            plan = StepPlan(1, 1, 0, encodes=encodes, encode_shares=shares)
            digest = outputs.digest_after(plan)
            with torch.inference_mode():
                outputs.apply(plan, encoder)
            assert digest == outputs.digest_after(StepPlan(2, 1, 0)) == outputs_digest([media_id])
        vision = engine.config.model.vision
        found = outputs.embeddings(StepMedia(np.arange(len(whole)), (Piece(media_id, 0, len(whole)),)))
        assert found is not None
        assert torch.equal(found.rows, whole[:, : vision.embedding_size])


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_text_model_alone_is_served_without_the_encoder(
    kind: str, model_of: Any, make_engine: Any, planned: Any
) -> None:
    model = model_of(kind)
    engine = make_engine(model.folder, max_model_len=1024, num_blocks=256, language_model_only=True)
    assert engine.runners[0].memory.loaded.encoder is None
    # As with SAMPLING: transformers would look for the image of a generated image token.
    biases = RowLogitsProcessors(logit_bias=tuple(sorted(SAMPLING["logit_bias"].items())))
    sampling = RowSampling(temperature=0.0, logits_processors=biases)
    sequence = planned(model.prompts[0].token_ids, NUM_TOKENS, sampling)
    engine.generate([sequence])
    model.reference.check_greedy(model.prompts[0], sequence.generated)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5", "mistral3"])
def test_outputs_of_one_prompt_share_its_images(kind: str, model_of: Any, make_engine: Any) -> None:
    model = model_of(kind)
    engine = make_engine(model.folder, max_model_len=1024, num_blocks=256)
    driver = RankedDriver(engine.config.with_num_blocks(64), engine.step, engine.take_media)
    prompt = model.prompts[2]
    driver.images.update(prompt.tensors)
    driver.add(0, prompt.token_ids, media=prompt.media, n=3, **SAMPLING)
    driver.run(depth=2)
    driver.empty_ranks()
    assert driver.scheduler.media.cache.num_encoded == len(prompt.media)
    for handle in range(3):
        assert len(driver.outputs[handle]) == NUM_TOKENS
        model.reference.check_greedy(prompt, driver.outputs[handle])


@pytest.mark.parametrize("scheme", ["packed", "awq"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_quantized_checkpoints_keep_the_encoder(
    kind: str, scheme: str, model_of: Any, make_engine: Any, tmp_path: Path
) -> None:
    """As published: the text model alone is quantized."""
    model = model_of(kind)
    ignored = "visual|vision_tower|multi_modal_projector"
    quantized, twin = write_quantized(model.folder, tmp_path, replace(SCHEMES[scheme], ignored=ignored))
    config = json.loads((quantized / "config.json").read_text())
    stored, modules = config["quantization_config"], ignored.split("|")
    if "ignore" in stored:
        stored["ignore"] += [f"re:.*{module}.*" for module in modules]
    else:
        stored["modules_to_not_convert"] = modules
    (quantized / "config.json").write_text(json.dumps(config))
    engine = make_engine(quantized, max_model_len=1024, num_blocks=256)
    run(model, engine, model.prompts, reference=VisionReference(twin))


@pytest.mark.parametrize("tp", [1, 2])
def test_stacks_of_experts_in_float8_have_stacks_of_scales(
    tp: int, model_of: Any, make_engine: Any, tmp_path: Path
) -> None:
    """As Step 3.7 is published."""
    model = model_of("step3p7")
    single = Path(shutil.copytree(model.folder, tmp_path / "single"))
    write_tensors(single, split_experts(load_file(single / "model.safetensors")))
    scheme = Scheme("float8", is_float=True, block=(16, 16), ignored=r"vision|vit_|lm_head|embed|moe\.gate\.")
    published, twin = write_quantized(single, tmp_path, scheme)
    for folder in (published, twin):
        write_tensors(folder, stack_experts(load_file(folder / "model.safetensors")))
    assert load_file(published / "model.safetensors")[
        "model.layers.1.moe.down_proj.weight_scale_inv"
    ].shape == (4, 4, 2)
    engine = make_engine(published, tp, max_model_len=1024, num_blocks=256)
    run(model, engine, model.prompts, reference=VisionReference(twin))


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with each expert's matrices under names of their own."""
    found = {name: each for name, each in tensors.items() if each.dim() != 3}
    for name in tensors.keys() - found.keys():
        for index, matrix in enumerate(tensors[name]):
            found[name.replace(".moe.", f".moe.{index}.")] = matrix.clone()
    return found


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with those of all of a layer's experts in stacks."""
    stacks = dict[str, dict[int, torch.Tensor]]()
    found = dict[str, torch.Tensor]()
    for name, each in tensors.items():
        index = re.search(r"\.moe\.(\d+)\.", name)
        if index is None:
            found[name] = each
        else:
            stacks.setdefault(name.replace(index[0], ".moe."), {})[int(index[1])] = each
    return found | {
        name: torch.stack([parts[index] for index in sorted(parts)]) for name, parts in stacks.items()
    }


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_images_are_encoded_again_by_new_weights(
    kind: str, model_of: Any, make_engine: Any, tmp_path: Path
) -> None:
    model, second = model_of(kind), tmp_path / "second"
    shutil.copytree(model.folder, second)
    torch.manual_seed(1)
    tensors = load_file(second / "model.safetensors")
    changed = {name: each + 0.05 * torch.randn_like(each) for name, each in tensors.items()}
    save_file(changed, second / "model.safetensors", metadata={"format": "pt"})
    engine = make_engine(model.folder, 2, max_model_len=1024, num_blocks=256)
    config = engine.config.with_num_blocks(256)
    driver = RankedDriver(config, engine.step, engine.take_media)
    prompts = model.prompts[1:3]
    for handle, prompt in enumerate(prompts):
        driver.images.update(prompt.tensors)
        driver.add(handle, prompt.token_ids, media=prompt.media, **SAMPLING | {"max_tokens": 12})
    while min(len(driver.outputs[handle]) for handle in range(2)) < 4:
        driver.step(depth=2)
    command = EngineCommand(Action.UPDATE_WEIGHTS, path=str(second), version="v")
    driver.scheduler.control.order(command, (b"", 1))
    while driver.scheduler.num_in_flight:
        driver.apply_result()
    lens = [len(driver.outputs[handle]) for handle in range(2)]
    driver.run(depth=2)
    reference = VisionReference(second)
    for handle, (prompt, length) in enumerate(zip(prompts, lens, strict=True)):
        before, after = driver.outputs[handle][:length], driver.outputs[handle][length:]
        model.reference.check_greedy(prompt, before)
        assert after
        reference.check_greedy(replace(prompt, token_ids=prompt.token_ids + before), after)
    assert len(driver.asked) == len({item.digest for prompt in prompts for item in prompt.media})
