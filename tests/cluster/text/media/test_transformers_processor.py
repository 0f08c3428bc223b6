"""Images become the tokens and tensors that each family's own processor of transformers makes of them."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_models import (
    QWEN_TOKENS,
    ImageFamily,
    file_of,
    frames_url,
    load_family_processor,
    picture,
    qwen_image_processor,
    save_processors,
    save_tokenizer,
)
from PIL import Image
from transformers.utils import is_torchvision_available

from quire.cluster.text.media.image_source import ImageError, ImageSource
from quire.cluster.text.media.transformers_processor import TransformersImageProcessor
from quire.cluster.text.requests.chat_template import Expansions
from quire.proto.errors import ConfigError


def image_processor(name: str, folder: str, **settings: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    return getattr(module, name)(**settings)


def torchvision_processor(name: str, folder: str, **settings: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_{folder}")
    return getattr(module, name)(**settings)


SQUARE = {"height": 32, "width": 32}
FAMILIES = [
    ImageFamily("qwen2_vl", "Qwen2VLProcessor", qwen_image_processor, QWEN_TOKENS, "<|image_pad|>"),
    ImageFamily("qwen2_5_vl", "Qwen2_5_VLProcessor", qwen_image_processor, QWEN_TOKENS, "<|image_pad|>"),
    ImageFamily("qwen3_vl", "Qwen3VLProcessor", qwen_image_processor, QWEN_TOKENS, "<|image_pad|>"),
    ImageFamily(
        "gemma3", "Gemma3Processor", lambda: image_processor("Gemma3ImageProcessorPil", "gemma3", size=SQUARE),
        ("<eos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"), "<image_soft_token>",
        {"image_seq_length": 4},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    ImageFamily(
        "llava", "LlavaProcessor",
        lambda: image_processor("CLIPImageProcessorPil", "clip", size={"shortest_edge": 32}, crop_size=SQUARE),
        ("</s>", "<image>"), "<image>", {"patch_size": 8, "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1},
    ),
    ImageFamily(
        "llava_onevision", "LlavaOnevisionProcessor",
        lambda: image_processor(
            "LlavaOnevisionImageProcessorPil", "llava_onevision", size=SQUARE,
            image_grid_pinpoints=[[32, 32], [32, 64], [64, 32], [64, 64]],
        ),
        ("</s>", "<image>", "<video>"), "<image>",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    ImageFamily(
        "internvl", "InternVLProcessor",
        lambda: image_processor("GotOcr2ImageProcessorPil", "got_ocr2", size=SQUARE, crop_to_patches=True,
                                max_patches=4),
        ("</s>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"), "<IMG_CONTEXT>", {"image_seq_length": 4},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
    ),
    ImageFamily(
        "idefics3", "Idefics3Processor",
        lambda: image_processor("Idefics3ImageProcessorPil", "idefics3", size={"longest_edge": 64},
                                max_image_size={"longest_edge": 32}),
        ("<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"), "<image>",
        {"image_seq_len": 4},
    ),
    ImageFamily(
        "smolvlm", "SmolVLMProcessor",
        lambda: image_processor("SmolVLMImageProcessorPil", "smolvlm", size={"longest_edge": 64},
                                max_image_size={"longest_edge": 32}),
        ("<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"), "<image>",
        {"image_seq_len": 4},
    ),
    ImageFamily(
        "paddleocr_vl", "PaddleOCRVLProcessor",
        lambda: image_processor("PaddleOCRVLImageProcessorPil", "paddleocr_vl", patch_size=4,
                                size={"shortest_edge": 64, "longest_edge": 4096}),
        ("</s>", "<|IMAGE_PLACEHOLDER|>"), "<|IMAGE_PLACEHOLDER|>", {}, {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    ImageFamily(
        "deepseek_ocr2", "DeepseekOcr2Processor",
        lambda: image_processor("DeepseekOcr2ImageProcessorPil", "deepseek_ocr2", size=SQUARE, tile_size=48,
                                max_patches=3),
        ("</s>", "<image>"), "<image>", {"patch_size": 4, "downsample_ratio": 2},
    ),
    ImageFamily(
        "glm4v", "Glm4vProcessor",
        lambda: image_processor("Glm4vImageProcessorPil", "glm4v", patch_size=4,
                                size={"shortest_edge": 64, "longest_edge": 8192}),
        ("<|endoftext|>", "<|image|>", "<|video|>"), "<|image|>", {},
        {"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
]  # fmt: skip
ON_TORCHVISION = [
    ImageFamily(
        "llama4", "Llama4Processor",
        lambda: torchvision_processor(
            "Llama4ImageProcessor", "llama4", size={"height": 28, "width": 28}, max_patches=4
        ),
        ("<|eot|>", "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>",
         "<|tile_y_separator|>"),
        "<|patch|>", {"patch_size": 7},
    ),
    ImageFamily(
        "step3p7", "Step3p7Processor",
        lambda: torchvision_processor(
            "Step3p7ImageProcessor", "step3p7", size={"height": 32, "width": 32}, patch_size=16, vision_patch_size=4,
            downsampler_stride=4,
        ),
        ("<|eot|>", "<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>"),
        "<im_patch>",
    ),
    ImageFamily(
        "muse_spark", "MuseSparkProcessor",
        lambda: torchvision_processor("MuseGlimmerImageProcessor", "muse_glimmer", patch_size=4, max_image_tokens=60),
        ("<|eot|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>", "<|audio|>"), "<|patch|>",
    ),
    ImageFamily(
        "minimax_m3_vl", "MiniMaxM3VLProcessor",
        lambda: torchvision_processor(
            "MiniMaxM3VLImageProcessor", "minimax_m3_vl", patch_size=4,
            size={"shortest_edge": 64, "longest_edge": 4096},
        ),
        ("<|eot|>", "]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["), "]<]image[>[",
    ),
    ImageFamily(
        "kimi_k25", "Kimi_K25Processor",
        lambda: torchvision_processor("Kimi_K25ImageProcessor", "kimi_k25", patch_size=4),
        ("<|eot|>", "<|media_pad|>"), "<|media_pad|>", {}, {"image_token": "<|media_pad|>"},
    ),
]  # fmt: skip
PALIGEMMA = ImageFamily(
    "paligemma", "PaliGemmaProcessor",
    lambda: image_processor("SiglipImageProcessorPil", "siglip", size=SQUARE, image_seq_length=16),
    ("</s>", "<s>", "<image>"), "<image>",
)  # fmt: skip
PIXTRAL = [
    ImageFamily(
        "pixtral", "PixtralProcessor",
        lambda: image_processor(
            "PixtralImageProcessorPil", "pixtral", size={"longest_edge": 64}, patch_size={"height": 8, "width": 8}
        ),
        ("</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]", {"patch_size": 8, "spatial_merge_size": 1},
    ),
    ImageFamily(
        "mistral3", "PixtralProcessor",
        lambda: image_processor(
            "PixtralImageProcessorPil", "pixtral", size={"longest_edge": 64}, patch_size={"height": 16, "width": 16}
        ),
        ("</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]", {"patch_size": 8, "spatial_merge_size": 2},
    ),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_processor_makes_what_the_familys_own_makes(family: ImageFamily, tmp_path: Path) -> None:
    if family.model_type == "smolvlm":
        pytest.importorskip("num2words")
    image_token_id = save_processors(family, tmp_path)
    processor = TransformersImageProcessor(str(tmp_path), image_token_id)
    pictures = [picture(70, 41, 1), picture(33, 90, 2)]
    images = [processor.process(ImageSource(data=file_of(each)), {}, b"") for each in pictures]
    reference = load_family_processor(family, tmp_path)
    token = images[0].placeholder
    assert token == reference.image_token
    text = f"one\n{token}\n\n two {token}."
    expected = reference(images=pictures, text=[text], return_tensors="np", add_special_tokens=False)
    expanded = Expansions({"image": (token, tuple(each.expansion for each in images))}).expand(text)
    own = reference.tokenizer(expanded, add_special_tokens=False)["input_ids"]
    assert own == np.asarray(expected["input_ids"])[0].tolist()
    assert own.count(image_token_id) == sum(each.num_embeddings for each in images)
    for name in images[0].tensors:
        check_equal_parts(np.asarray(expected[name]), [each.tensors[name] for each in images])


def check_equal_parts(whole: Any, parts: list[Any]) -> None:
    """Compare the tensor of both images with that of each; a shorter one is padded."""
    if whole.ndim and len(parts[0]) == 1 == len(whole) and whole.ndim > 2:  # [batch, images, ...]
        whole, parts = whole[0], [part[0] for part in parts]
    start = 0
    for part in parts:
        own = whole[start : start + len(part)]
        own = own[tuple(slice(length) for length in part.shape)]
        np.testing.assert_array_equal(own, part)
        start += len(part)
    assert start == len(whole) or not whole[start:].any()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> TransformersImageProcessor:
    folder = tmp_path_factory.mktemp("qwen")
    return TransformersImageProcessor(str(folder), save_processors(FAMILIES[1], folder))


def test_digest_is_of_pixels_settings_and_sharers(qwen: TransformersImageProcessor) -> None:
    image = picture(64, 48, 1)
    png = ImageSource(data=file_of(image))

    def digest(source: ImageSource = png, root: bytes = b"a", **settings: Any) -> bytes:
        return qwen.process(source, settings, root).digest

    assert digest() == digest(ImageSource(data=file_of(image, "WEBP", lossless=True))) == digest()
    others = [
        digest(ImageSource(data=file_of(picture(64, 48, 2)))),
        digest(root=b"b"),
        digest(max_pixels=1024),
        digest(ImageSource(data=file_of(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)))),
    ]
    assert len({digest(), *others}) == 5


def test_grid_and_tokens_are_those_of_the_patches(qwen: TransformersImageProcessor) -> None:
    found = qwen.process(ImageSource(image=picture(64, 48)), {}, b"")
    frames, rows, columns = found.grid
    assert found.num_embeddings == frames * rows * columns // 4 == len(found.token_ids)
    assert found.tensors["pixel_values"].shape[0] == rows * columns
    assert found.num_bytes == sum(each.nbytes for each in found.tensors.values())


def test_settings_that_the_processor_lacks_and_odd_shapes_are_refused(
    qwen: TransformersImageProcessor,
) -> None:
    with pytest.raises(ImageError, match="cannot be processed"):
        qwen.process(ImageSource(image=picture(2, 900)), {}, b"")
    for name in ("images", "videos", "audio", "text"):
        with pytest.raises(ImageError, match=f"cannot be processed: its settings have {name}"):
            qwen.process(ImageSource(image=picture(64, 64)), {name: "http://169.254.169.254/"}, b"")


def test_folder_without_a_processor_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"has no processor|cannot be loaded"):
        TransformersImageProcessor(str(tmp_path), 7).load()


@pytest.mark.parametrize("family", ON_TORCHVISION, ids=lambda family: family.model_type)
def test_processor_on_torchvision_makes_what_the_familys_own_makes(
    family: ImageFamily, tmp_path: Path
) -> None:
    if not is_torchvision_available():
        pytest.skip("torchvision is not installed")
    image_token_id = save_processors(family, tmp_path)
    processor = TransformersImageProcessor(str(tmp_path), image_token_id)
    pictures = [picture(70, 41, 1), picture(33, 90, 2)]
    images = [processor.process(ImageSource(data=file_of(each)), {}, b"") for each in pictures]
    reference, token = load_family_processor(family, tmp_path), images[0].placeholder
    text = f"one {token} two {token}."
    expected = reference(images=pictures, text=[text], return_tensors="pt", add_special_tokens=False)
    expanded = Expansions({"image": (token, tuple(each.expansion for each in images))}).expand(text)
    own = reference.tokenizer(expanded, add_special_tokens=False)["input_ids"]
    assert own == expected["input_ids"][0].tolist()
    assert own.count(image_token_id) == sum(each.num_embeddings for each in images)
    pixels = np.concatenate([each.tensors["pixel_values"] for each in images])
    np.testing.assert_array_equal(pixels, expected["pixel_values"].float().numpy())


def test_model_whose_processor_needs_torchvision_says_so(tmp_path: Path) -> None:
    if is_torchvision_available():
        pytest.skip("torchvision is installed")
    save_tokenizer(tmp_path, ON_TORCHVISION[0].tokens)
    (tmp_path / "config.json").write_text('{"model_type": "llama4"}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Llama4ImageProcessor"}')
    with pytest.raises(ConfigError, match=r"(?i)torchvision"):
        TransformersImageProcessor(str(tmp_path), 7).load()


def test_paligemma_reads_images_before_the_text_and_the_end_of_a_line(tmp_path: Path) -> None:
    """The processor of transformers writes these into the prompt itself; here a template does."""
    image_token_id = save_processors(PALIGEMMA, tmp_path)
    processor = TransformersImageProcessor(str(tmp_path), image_token_id)
    pictures = [picture(70, 41, 1), picture(33, 90, 2)]
    images = [processor.process(ImageSource(image=each), {}, b"") for each in pictures]
    reference = load_family_processor(PALIGEMMA, tmp_path)
    reference.tokenizer.bos_token = "<s>"
    expected = reference(images=[pictures], text=["<image><image>caption en"], return_tensors="np")
    text = "<image><image><s>caption en\n"
    expanded = Expansions({"image": ("<image>", tuple(each.expansion for each in images))}).expand(text)
    own = reference.tokenizer(expanded, add_special_tokens=False)["input_ids"]
    assert own == np.asarray(expected["input_ids"])[0].tolist()
    assert own.count(image_token_id) == sum(each.num_embeddings for each in images) == 32
    pixels = np.concatenate([each.tensors["pixel_values"] for each in images])
    np.testing.assert_array_equal(pixels, np.asarray(expected["pixel_values"]))
    assert all(each.tensors.keys() == {"pixel_values"} for each in images)


@pytest.mark.parametrize("family", PIXTRAL, ids=lambda family: family.model_type)
def test_pixtral_ends_each_row_of_squares(family: ImageFamily, tmp_path: Path) -> None:
    processor = TransformersImageProcessor(str(tmp_path), save_processors(family, tmp_path))
    image = processor.process(ImageSource(image=picture(64, 33)), {}, b"")
    square = family.settings["patch_size"] * family.settings["spatial_merge_size"]
    height, width = image.tensors["image_sizes"][0].tolist()
    assert image.tensors["pixel_values"].shape == (1, 3, height, width)
    assert (height % square, width % square) == (0, 0)
    row, rows = "[IMG]" * (width // square), height // square
    assert image.expansion == "[IMG_BREAK]".join([row] * rows) + "[IMG_END]"
    assert image.num_embeddings == rows * width // square


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_video_becomes_what_the_familys_own_processor_makes(model_type: str, tmp_path: Path) -> None:
    """Beside an image, with an odd number of frames, at two rates."""
    if not is_torchvision_available():
        pytest.skip("torchvision is not installed")
    family = next(each for each in FAMILIES if each.model_type == model_type)
    image_token_id = save_processors(family, tmp_path)
    processor = TransformersImageProcessor(str(tmp_path), image_token_id, video_token_id=image_token_id + 1)
    assert processor.video_problem == ""
    frames, image = [picture(60, 44, seed) for seed in range(5)], picture(33, 90, 9)
    source = ImageSource(kind="video", url=frames_url(frames))
    reference = load_family_processor(family, tmp_path, reads_videos=True)
    text = "one <|image_pad|> and <|video_pad|>."
    found = {}
    for fps in (None, 3.0):
        settings = {} if fps is None else {"fps": fps}
        video, still = (
            processor.process(source, settings, b""),
            processor.process(ImageSource(image=image), {}, b""),
        )
        found[fps] = video
        metadata = {"total_num_frames": 5, "fps": fps or 2.0, "frames_indices": list(range(5))}
        expected = reference(
            images=[image], videos=[frames], text=[text], video_metadata=[metadata], do_sample_frames=False,
            return_tensors="pt", add_special_tokens=False,
        )  # fmt: skip
        by_kind: dict[str, Any] = {each.kind: (each.placeholder, [each.expansion]) for each in (video, still)}
        own = reference.tokenizer(Expansions(by_kind).expand(text), add_special_tokens=False)["input_ids"]
        assert own == expected["input_ids"][0].tolist()
        assert own.count(image_token_id + 1) == video.num_embeddings == 3 * video.grid[1] * video.grid[2] // 4
        np.testing.assert_array_equal(video.tensors["pixel_values"], expected["pixel_values_videos"])
        assert list(video.grid) == expected["video_grid_thw"][0].tolist()
        seconds = expected.get("second_per_grid_ts", [0.0])
        assert video.seconds_per_frame == float(seconds[0])
    assert found[None].digest != found[3.0].digest
    turned = ImageSource(kind="video", frames=tuple(frames[::-1]))
    assert (
        len({processor.process(turned, {}, root).digest for root in (b"", b"a")} | {found[None].digest}) == 3
    )
    with pytest.raises(ImageError, match="its settings have images"):
        processor.process(source, {"images": "http://169.254.169.254/"}, b"")
    for wrong in (0, "fast", True):
        with pytest.raises(ImageError, match="frames per second, must have"):
            processor.process(source, {"fps": wrong}, b"")


@pytest.mark.parametrize("name", ["Glm4vProcessor", "Glm46VProcessor"])
def test_frames_of_glm_have_the_tokens_of_images_and_times_as_text(name: str, tmp_path: Path) -> None:
    if not is_torchvision_available():
        pytest.skip("torchvision is not installed")
    family = next(each for each in FAMILIES if each.model_type == "glm4v")
    family = replace(family, processor=name, model_type=name.removesuffix("Processor").lower())
    image_token_id = save_processors(family, tmp_path)
    processor = TransformersImageProcessor(str(tmp_path), image_token_id, video_token_id=image_token_id)
    frames, text = [picture(60, 44, seed) for seed in range(5)], "one <|video|>."
    reference = load_family_processor(family, tmp_path, reads_videos=True)
    for fps in (2.0, 0.3):
        video = processor.process(ImageSource(kind="video", frames=tuple(frames)), {"fps": fps}, b"")
        metadata = {"total_num_frames": 5, "fps": fps, "frames_indices": list(range(5))}
        expected = reference(
            videos=[frames], text=[text], video_metadata=[metadata], do_sample_frames=False,
            return_tensors="pt", add_special_tokens=False,
        )  # fmt: skip
        expanded = Expansions({"video": (video.placeholder, [video.expansion])}).expand(text)
        own = reference.tokenizer(expanded, add_special_tokens=False)["input_ids"]
        assert own == expected["input_ids"][0].tolist()
        assert own.count(image_token_id) == video.num_embeddings == 3 * video.grid[1] * video.grid[2] // 4
        np.testing.assert_array_equal(video.tensors["pixel_values"], expected["pixel_values_videos"])
        assert list(video.grid) == expected["video_grid_thw"][0].tolist()
        assert video.seconds_per_frame == 0.0  # times are text: of the first frame of each two
        assert f"<|end_of_image|>{int(4 / fps)}" in video.expansion


def test_video_is_refused_by_models_of_images_and_without_torchvision(
    qwen: TransformersImageProcessor,
) -> None:
    assert qwen.video_problem == "the model reads text and images only"
    if not is_torchvision_available():
        problem = TransformersImageProcessor("", 1, video_token_id=2).video_problem
        assert problem == "the server lacks torchvision, which processes videos"
