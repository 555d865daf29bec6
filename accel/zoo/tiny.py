"""Tiny pipelines of many families: real diffusers classes, random weights, built offline in under a second.

For tests, and for trying a recipe on a pipeline's shape before paying for its weights. The pictures are noise, but
they depend on prompt, step and seed, so that "the same picture" and "another picture" both mean something.

    pipe = tiny("sdxl")
    image = pipe(**FAMILIES["sdxl"].call())[0]
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# diffusers annotates components by the class of its first user.

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from string import printable
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn

WIDTH = 32  # of every text encoder, so that any denoiser can read any of them
LENGTH = 32  # longest prompt, in tokens; one character is one token
SIDE = 32  # picture, in pixels


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of pipeline.

    `build(seed)` makes it, `call()` gives fresh keyword arguments of one small call (three steps, guidance on where
    the family has it, a generator of its own), and `off` are the keywords that switch guidance off.
    Tags: "unet" or "transformer"; "cfg" (guidance by a second branch); "video"; "image_input"; "mask_input".
    """

    name: str
    build: Callable[[int], DiffusionPipeline]
    call: Callable[[], dict[str, Any]]
    tags: frozenset[str]
    off: Mapping[str, Any] = field(default_factory=dict)


def tiny(name: str, seed: int = 0) -> DiffusionPipeline:
    """Build the family `name`; equal seeds give bitwise equal weights, and torch's global generator is not moved.

    Raises KeyError, listing the families, for an unknown name.
    """
    if name not in FAMILIES:
        raise KeyError(f"no tiny family {name!r}; there are: {', '.join(FAMILIES)}")
    pipe = FAMILIES[name].build(seed)
    pipe.set_progress_bar_config(disable=True)
    return pipe


# ---------------------------------------------------------------------------------------------------- weights


def _draw(seed: int, model: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Any:
    """A model with weights of its own seed, whatever else a pipeline holds: img2img shares its UNet with text2img."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = model(*args, **kwargs).eval()
        for parameter in module.parameters():
            _wake(parameter)
    return module


@torch.no_grad()
def _wake(parameter: nn.Parameter) -> None:
    """Layers that training starts from zero (ControlNet, adaLN-zero) would hide prompt and step from the output."""
    if not parameter.any():
        parameter.normal_(std=0.1)


# ---------------------------------------------------------------------------------------------------- text


def _byte_level(*special: str) -> dict[str, int]:
    """A vocabulary that gives every byte an id of its own, as GPT-2 spells bytes, inside and at the end of a word."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    return {token: i for i, token in enumerate([*special, *letters, *(f"{letter}</w>" for letter in letters)])}


def _clip_tokenizer() -> Any:
    vocab = _byte_level("<|startoftext|>", "<|endoftext|>")
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=LENGTH)


def _t5_tokenizer() -> Any:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *(letter for letter in printable if not letter.isspace())]
    vocab = [(piece, 0.0 if i < 3 else -2.0) for i, piece in enumerate(pieces)]
    return transformers.T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=LENGTH)


def _gemma_tokenizer() -> Any:
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    return transformers.GemmaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])


# Of the instruction that the Qwen-Image pipeline puts around a prompt; spelled byte by byte it would drown the prompt.
_QWEN_WORDS = (
    "system user assistant Describe image detailing color shape size texture quantity text spatial relationships "
    "objects background"
)


def _qwen_tokenizer() -> Any:
    vocab = _byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocab, merges=[], chat_template=template, additional_special_tokens=special
    )
    tokenizer.add_tokens(_QWEN_WORDS.split())
    return tokenizer


def _clip(seed: int, tokenizer: Any, *, projected: bool = False, width: int = WIDTH) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        projection_dim=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return _draw(seed, model, config)


def _t5(seed: int, tokenizer: Any, *, umt5: bool = False) -> Any:
    config = transformers.UMT5Config if umt5 else transformers.T5Config
    model = transformers.UMT5EncoderModel if umt5 else transformers.T5EncoderModel
    return _draw(
        seed, model, config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )


def _decoder_config(tokenizer: Any) -> dict[str, Any]:
    """Sizes that the decoder language models (Gemma, Qwen) share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _gemma(seed: int, tokenizer: Any) -> Any:
    config = transformers.Gemma2Config(**_decoder_config(tokenizer), head_dim=8)
    return _draw(seed, transformers.Gemma2Model, config)


def _qwen3(seed: int, tokenizer: Any) -> Any:
    return _draw(seed, transformers.Qwen3Model, transformers.Qwen3Config(**_decoder_config(tokenizer), head_dim=8))


def _qwen_vl(seed: int, tokenizer: Any) -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": 2, "out_hidden_size": WIDTH}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_decoder_config(tokenizer), "rope_parameters": rope}, vision_config=vision
    )
    return _draw(seed, transformers.Qwen2_5_VLForConditionalGeneration, config)


# ---------------------------------------------------------------------------------------------------- pictures


def _vae(seed: int, **kwargs: Any) -> Any:
    """An image autoencoder that halves each side: SIDE pixels are 16 latents."""
    sizes = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "sample_size": SIDE,
    }
    return _draw(seed, diffusers.AutoencoderKL, **(sizes | kwargs))


def _unet_config(**kwargs: Any) -> dict[str, Any]:
    sizes = {
        "sample_size": SIDE // 2,
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "layers_per_block": 2,
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return sizes | kwargs


def _unet(seed: int, **kwargs: Any) -> Any:
    config = _unet_config(**({"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")} | kwargs))
    return _draw(seed, diffusers.UNet2DConditionModel, **config)


def _noise_scheduler() -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def _picture(level: int = 0) -> Image.Image:
    """A gradient from `level`, so that image inputs are neither flat nor random."""
    ramp = Image.linear_gradient("L").resize((SIDE, SIDE))
    return Image.merge("RGB", [ramp.point(lambda x, k=k: (x + level + 60 * k) % 256) for k in range(3)])


def _mask() -> Image.Image:
    return Image.linear_gradient("L").resize((SIDE, SIDE)).point(lambda x: 255 * (x > 127))


# ---------------------------------------------------------------------------------------------------- UNet families


def _sd(pipeline: str, seed: int, *, controlnet: bool = False, unet: Mapping[str, Any] | None = None) -> Any:
    """Stable Diffusion 1.5 in any of its pipelines."""
    tokenizer = _clip_tokenizer()
    parts: dict[str, Any] = {
        "vae": _vae(seed),
        "text_encoder": _clip(seed, tokenizer),
        "tokenizer": tokenizer,
        "unet": _unet(seed, **(unet or {})),
        "scheduler": _noise_scheduler(),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    if controlnet:
        hints = {"conditioning_embedding_out_channels": (8, 8)}  # one halving, as the autoencoder
        config = {k: v for k, v in _unet_config().items() if k != "sample_size"}
        parts["controlnet"] = _draw(seed, diffusers.ControlNetModel, **config, **hints)
    return getattr(diffusers, pipeline)(**parts)


def _sdxl(pipeline: str, seed: int) -> Any:
    tokenizer = _clip_tokenizer()
    unet = _unet(
        seed,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        cross_attention_dim=2 * WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )
    return getattr(diffusers, pipeline)(
        vae=_vae(seed, force_upcast=False),
        text_encoder=_clip(seed, tokenizer),
        text_encoder_2=_clip(seed + 1, tokenizer, projected=True),
        tokenizer=tokenizer,
        tokenizer_2=_clip_tokenizer(),
        unet=unet,
        scheduler=_noise_scheduler(),
        add_watermarker=False,
    )


def _ddpm(seed: int) -> Any:
    unet = _draw(
        seed,
        diffusers.UNet2DModel,
        sample_size=SIDE // 2,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=8,
        norm_num_groups=4,
    )
    return diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler())


def _animatediff(seed: int) -> Any:
    adapter = _draw(
        seed,
        diffusers.MotionAdapter,
        block_out_channels=(16, 32),
        motion_layers_per_block=2,
        motion_num_attention_heads=2,
        motion_norm_num_groups=4,
        motion_max_seq_length=8,
    )
    tokenizer = _clip_tokenizer()
    with torch.random.fork_rng(devices=[]):  # the pipeline draws a UNet of its own before it copies these weights
        return diffusers.AnimateDiffPipeline(
            vae=_vae(seed),
            text_encoder=_clip(seed, tokenizer),
            tokenizer=tokenizer,
            unet=_unet(seed),
            motion_adapter=adapter,
            scheduler=_noise_scheduler(),
        )


# --------------------------------------------------------------------------------------------- transformer families


def _dit(seed: int) -> Any:
    transformer = _draw(
        seed,
        diffusers.DiTTransformer2DModel,
        sample_size=SIDE // 2,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        out_channels=8,
    )
    return diffusers.DiTPipeline(
        transformer=transformer, vae=_vae(seed), scheduler=_noise_scheduler(), id2label={0: "fox", 1: "hen"}
    )


def _pixart(seed: int) -> Any:
    tokenizer = _t5_tokenizer()
    transformer = _draw(
        seed,
        diffusers.PixArtTransformer2DModel,
        sample_size=SIDE // 2,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        use_additional_conditions=False,
    )
    return diffusers.PixArtSigmaPipeline(
        vae=_vae(seed),
        text_encoder=_t5(seed, tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler.from_config(_noise_scheduler().config),
    )


def _sd3(pipeline: str, seed: int) -> Any:
    clip, t5 = _clip_tokenizer(), _t5_tokenizer()
    transformer = _draw(
        seed,
        diffusers.SD3Transformer2DModel,
        sample_size=SIDE // 2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return getattr(diffusers, pipeline)(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(seed, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
        text_encoder=_clip(seed, clip, projected=True, width=WIDTH // 2),
        tokenizer=clip,
        text_encoder_2=_clip(seed + 1, clip, projected=True, width=WIDTH // 2),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5(seed, t5),
        tokenizer_3=t5,
    )


def _flux(pipeline: str, seed: int) -> Any:
    clip, t5 = _clip_tokenizer(), _t5_tokenizer()
    transformer = _draw(
        seed,
        diffusers.FluxTransformer2DModel,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(seed, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
        text_encoder=_clip(seed, clip),
        tokenizer=clip,
        text_encoder_2=_t5(seed, t5),
        tokenizer_2=t5,
        transformer=transformer,
    )


def _sana(seed: int) -> Any:
    tokenizer = _gemma_tokenizer()
    vae = _draw(
        seed,
        diffusers.AutoencoderDC,
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
    )
    transformer = _draw(
        seed,
        diffusers.SanaTransformer2DModel,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        sample_size=SIDE // 2,
    )
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=_gemma(seed, tokenizer),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def _causal_vae(seed: int, model: type[nn.Module], **kwargs: Any) -> Any:
    """The autoencoder of Wan, which Qwen-Image shares: halves time once, each side twice."""
    sizes = {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True],
        "latents_mean": [0.1, -0.1, 0.0, 0.2],
        "latents_std": [1.0, 1.1, 0.9, 1.2],
    }
    vae = _draw(seed, model, **sizes, **kwargs)
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(8.0)  # else all pictures are one grey, to the eye and in 8 bits
    return vae


def _wan(seed: int, *, two_stages: bool = False) -> Any:
    tokenizer = _t5_tokenizer()

    def transformer(seed: int) -> Any:
        return _draw(
            seed,
            diffusers.WanTransformer3DModel,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=12,
            text_dim=WIDTH,
            freq_dim=16,
            ffn_dim=32,
            rope_max_seq_len=32,
        )

    stages = {"transformer_2": transformer(seed + 1), "boundary_ratio": 0.9} if two_stages else {}
    return diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5(seed, tokenizer, umt5=True),
        vae=_causal_vae(seed, diffusers.AutoencoderKLWan, scale_factor_temporal=2, scale_factor_spatial=4),
        transformer=transformer(seed),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        **stages,
    )


def _cogvideox(seed: int) -> Any:
    tokenizer = _t5_tokenizer()
    vae = _draw(
        seed,
        diffusers.AutoencoderKLCogVideoX,
        down_block_types=("CogVideoXDownBlock3D",) * 2,
        up_block_types=("CogVideoXUpBlock3D",) * 2,
        block_out_channels=(8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=2,
        sample_height=SIDE // 2,
        sample_width=SIDE // 2,
    )
    transformer = _draw(
        seed,
        diffusers.CogVideoXTransformer3DModel,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        time_embed_dim=8,
        text_embed_dim=WIDTH,
        max_text_seq_length=LENGTH,
        sample_width=SIDE // 4,
        sample_height=SIDE // 4,
        sample_frames=5,
        temporal_compression_ratio=2,
        use_rotary_positional_embeddings=True,
    )
    return diffusers.CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5(seed, tokenizer),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )


def _qwen_image(seed: int) -> Any:
    tokenizer = _qwen_tokenizer()
    transformer = _draw(
        seed,
        diffusers.QwenImageTransformer2DModel,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_causal_vae(seed, diffusers.AutoencoderKLQwenImage),
        text_encoder=_qwen_vl(seed, tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _z_image(seed: int) -> Any:
    tokenizer = _qwen_tokenizer()
    transformer = _draw(
        seed,
        diffusers.ZImageTransformer2DModel,
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(seed, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
        text_encoder=_qwen3(seed, tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
    )


# ---------------------------------------------------------------------------------------------------- the table


def _call(**kwargs: Any) -> dict[str, Any]:
    """What most families take; a None takes a keyword away."""
    call = {
        "prompt": "a red fox",
        "height": SIDE,
        "width": SIDE,
        "num_inference_steps": 3,
        "output_type": "pt",
        "generator": torch.Generator().manual_seed(0),
    }
    return {name: value for name, value in (call | kwargs).items() if value is not None}


def _cfg_call(**kwargs: Any) -> dict[str, Any]:
    return _call(**({"negative_prompt": "blurry", "guidance_scale": 4.0} | kwargs))


def _image_call(call: Callable[..., dict[str, Any]], *names: str, **kwargs: Any) -> dict[str, Any]:
    """A call with the picture or mask that each of `names` takes."""
    inputs = {name: _mask() if name == "mask_image" else _picture() for name in names}
    return call(**inputs, **kwargs)


def _family(name: str, build: Callable[[int], Any], call: Callable[[], dict], tags: str, **off: Any) -> Family:
    return Family(name=name, build=build, call=call, tags=frozenset(tags.split()), off=off)


_IMG2IMG = {"height": None, "width": None, "num_inference_steps": 5, "strength": 0.7}  # 3 of 5 steps are run
_SIZE = {"height": SIDE, "width": SIDE}
_SHORT = {"max_sequence_length": LENGTH}
_TRUE_CFG = {"true_cfg_scale": 3.0, "guidance_scale": 3.5, "negative_prompt": "blurry", **_SHORT}
_NO_TRUE_CFG = {"true_cfg_scale": 1.0, "negative_prompt": None}
_PIX2PIX = {"height": None, "width": None, "image_guidance_scale": 2.0}

_TABLE = (
    _family("sd", partial(_sd, "StableDiffusionPipeline"), _cfg_call, "unet cfg", guidance_scale=1.0),
    _family(
        "sd_img2img",
        partial(_sd, "StableDiffusionImg2ImgPipeline"),
        partial(_image_call, _cfg_call, "image", **_IMG2IMG),
        "unet cfg image_input",
        guidance_scale=1.0,
    ),
    _family(
        "sd_inpaint",
        partial(_sd, "StableDiffusionInpaintPipeline", unet={"in_channels": 9}),
        partial(_image_call, _cfg_call, "image", "mask_image"),
        "unet cfg image_input mask_input",
        guidance_scale=1.0,
    ),
    _family(
        "sd_controlnet",
        partial(_sd, "StableDiffusionControlNetPipeline", controlnet=True),
        partial(_image_call, _cfg_call, "image"),
        "unet cfg image_input controlnet",
        guidance_scale=1.0,
    ),
    _family(
        "sd_instruct_pix2pix",
        partial(_sd, "StableDiffusionInstructPix2PixPipeline", unet={"in_channels": 8}),
        partial(_image_call, _cfg_call, "image", **_PIX2PIX),
        "unet cfg image_input",
        guidance_scale=1.0,
    ),
    _family(
        "sd_pag",
        partial(_sd, "StableDiffusionPAGPipeline"),
        partial(_cfg_call, pag_scale=2.0),
        "unet cfg",
        guidance_scale=1.0,
        pag_scale=0.0,
    ),
    _family("sdxl", partial(_sdxl, "StableDiffusionXLPipeline"), _cfg_call, "unet cfg", guidance_scale=1.0),
    _family(
        "sdxl_img2img",
        partial(_sdxl, "StableDiffusionXLImg2ImgPipeline"),
        partial(_image_call, _cfg_call, "image", **_IMG2IMG),
        "unet cfg image_input",
        guidance_scale=1.0,
    ),
    _family("animatediff", _animatediff, partial(_cfg_call, num_frames=2), "unet cfg video", guidance_scale=1.0),
    _family(
        "ddpm",
        _ddpm,
        partial(_call, prompt=None, height=None, width=None, output_type="np"),
        "unet unconditional",
    ),
    _family(
        "dit",
        _dit,
        partial(_call, prompt=None, height=None, width=None, output_type="np", class_labels=[1], guidance_scale=4.0),
        "transformer cfg class",
        guidance_scale=1.0,
    ),
    _family(
        "pixart",
        _pixart,
        partial(_cfg_call, **_SHORT, use_resolution_binning=False, clean_caption=False),
        "transformer cfg",
        guidance_scale=1.0,
    ),
    _family(
        "sd3",
        partial(_sd3, "StableDiffusion3Pipeline"),
        partial(_cfg_call, **_SHORT),
        "transformer cfg",
        guidance_scale=1.0,
    ),
    _family("flux", partial(_flux, "FluxPipeline"), partial(_call, **_TRUE_CFG), "transformer cfg", **_NO_TRUE_CFG),
    _family(
        "flux_img2img",
        partial(_flux, "FluxImg2ImgPipeline"),
        partial(_image_call, _call, "image", **(_IMG2IMG | _SIZE | _TRUE_CFG)),
        "transformer cfg image_input",
        **_NO_TRUE_CFG,
    ),
    _family(
        "sana",
        _sana,
        partial(_cfg_call, **_SHORT, use_resolution_binning=False, clean_caption=False, complex_human_instruction=[]),
        "transformer cfg",
        guidance_scale=1.0,
    ),
    _family("wan", _wan, partial(_cfg_call, num_frames=5, **_SHORT), "transformer cfg video", guidance_scale=1.0),
    _family(
        "wan22",
        partial(_wan, two_stages=True),
        partial(_cfg_call, num_frames=5, **_SHORT),
        "transformer cfg video",
        guidance_scale=1.0,
    ),
    _family(
        "cogvideox",
        _cogvideox,
        partial(_cfg_call, num_frames=5, height=SIDE // 2, width=SIDE // 2, **_SHORT),
        "transformer cfg video",
        guidance_scale=1.0,
    ),
    _family(
        "qwen_image",
        _qwen_image,
        partial(_call, negative_prompt="blurry", true_cfg_scale=3.0),
        "transformer cfg",
        **_NO_TRUE_CFG,
    ),
    _family("z_image", _z_image, partial(_cfg_call, max_sequence_length=64), "transformer cfg", guidance_scale=0.0),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _TABLE}
