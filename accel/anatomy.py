"""What a pipeline is made of, as tables by class, because diffusers says none of it in a form that code can ask for:
which component denoises, which rows of its batch are which guidance branch, which arguments have a row per image,
which attention layers read the text.

Everything here was read in diffusers 0.42. A class that is in no table is unknown, and says so: `branches` gives
None, the others raise `Unsupported`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from .errors import Unsupported

T = TypeVar("T")

# ------------------------------------------------------------------------------------------------- components

# In the order in which a call uses them. A "decoder" of this name denoises too (Stable Cascade, unCLIP): what turns
# latents into pixels is called vae, movq, ... instead.
DENOISERS = (
    "prior_prior",
    "prior",
    "transformer",
    "transformer_2",
    "unconditional_transformer",
    "unet",
    "image_unet",
    "decoder",
    "super_res_first",
    "super_res_last",
)
DECODERS = ("vae", "vae_decoder", "movq", "vqvae", "vqgan", "audio_vae", "vocoder")


def denoisers(pipe: Any) -> dict[str, nn.Module]:
    """The components called once or more per step, by name, in the order of their work.

    Raises `Unsupported` for a pipeline that has none by a known name.
    """
    if found := _modules(pipe, DENOISERS):
        return found
    raise Unsupported(
        f"{type(pipe).__name__} has no denoiser that fewstep knows (one of {', '.join(DENOISERS)}): "
        "hand the model itself to accelerate(model, recipe)"
    )


def text_encoders(pipe: Any) -> dict[str, nn.Module]:
    """The text encoders that are present, by name: text_encoder, text_encoder_2, prior_text_encoder, ..."""
    names = [f"{prefix}text_encoder{suffix}" for prefix in ("", "prior_") for suffix in ("", "_2", "_3", "_4")]
    return _modules(pipe, names)


def decoders(pipe: Any) -> dict[str, nn.Module]:
    """What turns latents into pixels or sound, by name: vae, movq, vocoder, ..."""
    return _modules(pipe, DECODERS)


def _modules(pipe: Any, names: Iterable[str]) -> dict[str, nn.Module]:
    present = {name: getattr(pipe, name, None) for name in names}
    return {name: part for name, part in present.items() if isinstance(part, nn.Module)}


def _by_class(cls: type, table: Mapping[str, T]) -> T | None:
    """The entry of `cls` or of the nearest class that it inherits from."""
    return next((table[base.__name__] for base in cls.__mro__ if base.__name__ in table), None)


def _bare(module: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped, whose class the tables know."""
    return getattr(module, "_orig_mod", module)


# ---------------------------------------------------------------------------------------------- guidance branches

# "cond": the prompt. "uncond": the negative or empty prompt. "image": negative prompt, but the image condition.
# "perturbed": the prompt through a model with parts switched off. Others are what their pipeline calls them.
Branches = tuple[str, ...]


@dataclass(frozen=True)
class Guidance:
    """How a pipeline lays out its guidance branches.

    `batched[factor]`: the branches of one denoiser call whose batch is `factor` times the images, in blocks: all
    images of the first branch, then all of the second. `calls[n]`: the branch of the n-th call of a step that holds
    one branch alone.
    """

    batched: Mapping[int, Branches | Callable[[Any], Branches]] = field(default_factory=dict)
    calls: Branches = ("cond",)


def _pag_pair(pipe: Any) -> Branches:
    """Two branches are two different things, told apart by whether this call perturbs."""
    return ("cond", "perturbed") if pipe.do_perturbed_attention_guidance else ("uncond", "cond")


_UNGUIDED = Guidance()  # or guided by an embedded scale, which is no branch
_UNCOND_FIRST = Guidance({2: ("uncond", "cond")})
_COND_FIRST = Guidance({2: ("cond", "uncond")})
_ONE_CALL_EACH = Guidance(calls=("cond", "uncond"))
_PIX2PIX = Guidance({3: ("cond", "image", "uncond")})
_PAG = Guidance({2: _pag_pair, 3: ("uncond", "cond", "perturbed")})

_LAYOUTS: tuple[tuple[Guidance, str], ...] = (
    (
        _UNCOND_FIRST,
        """
        StableDiffusionPipeline StableDiffusionImg2ImgPipeline StableDiffusionInpaintPipeline
        StableDiffusionDepth2ImgPipeline StableDiffusionImageVariationPipeline StableDiffusionUpscalePipeline
        StableDiffusionLatentUpscalePipeline StableUnCLIPPipeline StableUnCLIPImg2ImgPipeline
        StableDiffusionControlNetPipeline StableDiffusionControlNetImg2ImgPipeline
        StableDiffusionControlNetInpaintPipeline StableDiffusionControlNetXSPipeline StableDiffusionAdapterPipeline
        StableDiffusionGLIGENPipeline StableDiffusionLDM3DPipeline StableDiffusionInpaintPipelineLegacy
        StableDiffusionModelEditingPipeline AltDiffusionPipeline AltDiffusionImg2ImgPipeline PaintByExamplePipeline
        BlipDiffusionPipeline BlipDiffusionControlNetPipeline LDMTextToImagePipeline
        StableDiffusionXLPipeline StableDiffusionXLImg2ImgPipeline StableDiffusionXLInpaintPipeline
        StableDiffusionXLControlNetPipeline StableDiffusionXLControlNetImg2ImgPipeline
        StableDiffusionXLControlNetInpaintPipeline StableDiffusionXLControlNetUnionPipeline
        StableDiffusionXLControlNetUnionImg2ImgPipeline StableDiffusionXLControlNetUnionInpaintPipeline
        StableDiffusionXLControlNetXSPipeline StableDiffusionXLAdapterPipeline KolorsPipeline KolorsImg2ImgPipeline
        StableDiffusion3Img2ImgPipeline StableDiffusion3InpaintPipeline StableDiffusion3ControlNetPipeline
        StableDiffusion3ControlNetInpaintingPipeline
        IFPipeline IFImg2ImgPipeline IFInpaintingPipeline IFSuperResolutionPipeline IFImg2ImgSuperResolutionPipeline
        IFInpaintingSuperResolutionPipeline UnCLIPPipeline UnCLIPImageVariationPipeline
        KandinskyPipeline KandinskyImg2ImgPipeline KandinskyInpaintPipeline KandinskyPriorPipeline
        KandinskyCombinedPipeline KandinskyImg2ImgCombinedPipeline KandinskyInpaintCombinedPipeline
        KandinskyV22Pipeline KandinskyV22Img2ImgPipeline KandinskyV22InpaintPipeline KandinskyV22ControlnetPipeline
        KandinskyV22ControlnetImg2ImgPipeline KandinskyV22PriorPipeline KandinskyV22PriorEmb2EmbPipeline
        KandinskyV22CombinedPipeline KandinskyV22Img2ImgCombinedPipeline KandinskyV22InpaintCombinedPipeline
        Kandinsky3Pipeline Kandinsky3Img2ImgPipeline
        AnimateDiffPipeline AnimateDiffControlNetPipeline AnimateDiffSDXLPipeline AnimateDiffSparseControlNetPipeline
        AnimateDiffVideoToVideoPipeline AnimateDiffVideoToVideoControlNetPipeline PIAPipeline I2VGenXLPipeline
        TextToVideoSDPipeline VideoToVideoSDPipeline StableVideoDiffusionPipeline
        PixArtAlphaPipeline PixArtSigmaPipeline SanaPipeline SanaControlNetPipeline SanaVideoPipeline
        SanaImageToVideoPipeline SanaWMPipeline HunyuanDiTPipeline HunyuanDiTControlNetPipeline AuraFlowPipeline
        LattePipeline AllegroPipeline CogVideoXPipeline CogVideoXImageToVideoPipeline CogVideoXVideoToVideoPipeline
        CogVideoXFunControlPipeline ConsisIDPipeline CogView3PlusPipeline MochiPipeline EasyAnimatePipeline
        EasyAnimateControlPipeline EasyAnimateInpaintPipeline LTXPipeline LTXImageToVideoPipeline LTXConditionPipeline
        LTXI2VLongMultiPromptPipeline HiDreamImagePipeline BriaPipeline BriaFiboPipeline BriaFiboEditPipeline
        PRXPipeline PRXPixelPipeline ErnieImagePipeline JoyImageEditPlusPipeline AnyFlowPipeline
        AudioLDMPipeline AudioLDM2Pipeline MusicLDMPipeline StableAudioPipeline StableAudio3Pipeline
        StableAudio3AudioToAudioPipeline StableAudio3InpaintPipeline
        AmusedPipeline AmusedImg2ImgPipeline AmusedInpaintPipeline VQDiffusionPipeline ShapEPipeline
        ShapEImg2ImgPipeline
        """,
    ),
    (
        # Z-Image, DiT and the cascades are where "the second half is the prompt" would be wrong.
        _COND_FIRST,
        """
        DiTPipeline LuminaPipeline ZImagePipeline ZImageImg2ImgPipeline ZImageInpaintPipeline
        ZImageControlNetPipeline ZImageControlNetInpaintPipeline ZImageOmniPipeline AceStepPipeline
        StableCascadePriorPipeline StableCascadeDecoderPipeline StableCascadeCombinedPipeline
        WuerstchenPriorPipeline WuerstchenDecoderPipeline WuerstchenCombinedPipeline
        """,
    ),
    (
        # All of them call the prompt first; those that open a `cache_context` name the branch by it as well.
        _ONE_CALL_EACH,
        """
        WanPipeline WanImageToVideoPipeline WanVideoToVideoPipeline WanVACEPipeline WanAnimatePipeline
        LucyEditPipeline SkyReelsV2Pipeline SkyReelsV2ImageToVideoPipeline SkyReelsV2DiffusionForcingPipeline
        SkyReelsV2DiffusionForcingImageToVideoPipeline SkyReelsV2DiffusionForcingVideoToVideoPipeline
        ChronoEditPipeline HeliosPipeline HeliosPyramidPipeline
        FluxPipeline FluxImg2ImgPipeline FluxInpaintPipeline FluxControlNetPipeline FluxKontextPipeline
        FluxKontextInpaintPipeline Flux2KleinPipeline Flux2KleinInpaintPipeline ChromaPipeline ChromaImg2ImgPipeline
        ChromaInpaintPipeline OvisImagePipeline LongCatImagePipeline LongCatImageEditPipeline Krea2Pipeline
        QwenImagePipeline QwenImageImg2ImgPipeline QwenImageInpaintPipeline QwenImageEditPipeline
        QwenImageEditInpaintPipeline QwenImageEditPlusPipeline QwenImageControlNetPipeline
        QwenImageControlNetInpaintPipeline QwenImageLayeredPipeline QwenImage21Pipeline NucleusMoEImagePipeline
        HunyuanVideoPipeline HunyuanVideoImageToVideoPipeline HunyuanVideoFramepackPipeline
        HunyuanSkyreelsImageToVideoPipeline HunyuanVideo15Pipeline HunyuanVideo15ImageToVideoPipeline
        HunyuanImagePipeline HunyuanImageRefinerPipeline MotifVideoPipeline MotifVideoImage2VideoPipeline
        Kandinsky5T2VPipeline Kandinsky5I2VPipeline Kandinsky5T2IPipeline Kandinsky5I2IPipeline
        Kandinsky6TI2VAPipeline CogView4Pipeline CogView4ControlPipeline Lumina2Pipeline BriaFibo2Pipeline
        Cosmos2TextToImagePipeline Cosmos2VideoToWorldPipeline Cosmos2_5_PredictBasePipeline
        Cosmos2_5_TransferPipeline Cosmos3OmniPipeline CosmosTextToWorldPipeline CosmosVideoToWorldPipeline
        Ideogram4Pipeline JoyImageEditPipeline LongCatAudioDiTPipeline
        """,
    ),
    (
        _PAG,
        """
        StableDiffusionPAGPipeline StableDiffusionPAGImg2ImgPipeline StableDiffusionPAGInpaintPipeline
        StableDiffusionControlNetPAGPipeline StableDiffusionControlNetPAGInpaintPipeline StableDiffusionXLPAGPipeline
        StableDiffusionXLPAGImg2ImgPipeline StableDiffusionXLPAGInpaintPipeline
        StableDiffusionXLControlNetPAGPipeline StableDiffusionXLControlNetPAGImg2ImgPipeline KolorsPAGPipeline
        StableDiffusion3PAGPipeline StableDiffusion3PAGImg2ImgPipeline HunyuanDiTPAGPipeline PixArtSigmaPAGPipeline
        SanaPAGPipeline AnimateDiffPAGPipeline
        """,
    ),
    (_PIX2PIX, "StableDiffusionInstructPix2PixPipeline StableDiffusionXLInstructPix2PixPipeline"),
    # skip_guidance_layers: a second call of the step, the prompt alone.
    (Guidance({2: ("uncond", "cond")}, calls=("cond", "perturbed")), "StableDiffusion3Pipeline"),
    # The extra calls of LTX-2 stand in contexts of their own, "uncond_stg" and "uncond_modality".
    (
        _UNCOND_FIRST,
        "LTX2Pipeline LTX2ImageToVideoPipeline LTX2ConditionPipeline LTX2HDRPipeline LTX2InContextPipeline",
    ),
    (Guidance({2: ("cond", "uncond"), 3: ("cond", "uncond", "image")}), "OmniGenPipeline"),
    (Guidance({2: ("uncond", "cond"), 3: ("uncond", "image", "cond")}), "DreamLitePipeline"),
    (Guidance({2: ("uncond", "cond"), 3: ("uncond", "cond", "safety")}), "StableDiffusionPipelineSafe"),
    (
        Guidance({2: ("source_cond", "cond"), 4: ("source_uncond", "uncond", "source_cond", "cond")}),
        "CycleDiffusionPipeline",
    ),
    (
        _UNGUIDED,
        """
        DDPMPipeline DDIMPipeline PNDMPipeline LDMPipeline LDMSuperResolutionPipeline ConsistencyModelPipeline
        DanceDiffusionPipeline LatentConsistencyModelPipeline LatentConsistencyModelImg2ImgPipeline SanaSprintPipeline
        SanaSprintImg2ImgPipeline DreamLiteMobilePipeline
        FluxControlPipeline FluxControlImg2ImgPipeline FluxControlInpaintPipeline FluxControlNetImg2ImgPipeline
        FluxControlNetInpaintPipeline FluxFillPipeline Flux2Pipeline Flux2KleinKVPipeline VisualClozePipeline
        VisualClozeGenerationPipeline Kandinsky6SRPipeline MarigoldDepthPipeline MarigoldIntrinsicsPipeline
        MarigoldNormalsPipeline
        """,
    ),
)

BRANCHES: dict[str, Guidance] = {name: layout for layout, names in _LAYOUTS for name in names.split()}

# Known, and in no table on purpose: they interleave branches (Panorama), call the model for gradients or edits
# beside guidance, cut one step into tiles or streams, or are no diffusion over latents at all.
_IRREGULAR = """
    StableDiffusionPanoramaPipeline StableDiffusionSAGPipeline StableDiffusionAttendAndExcitePipeline
    StableDiffusionDiffEditPipeline StableDiffusionPix2PixZeroPipeline StableDiffusionParadigmsPipeline
    StableDiffusionGLIGENTextImagePipeline SemanticStableDiffusionPipeline LEditsPPPipelineStableDiffusion
    LEditsPPPipelineStableDiffusionXL TextToVideoZeroPipeline TextToVideoZeroSDXLPipeline UniDiffuserPipeline
    VersatileDiffusionDualGuidedPipeline VersatileDiffusionImageVariationPipeline
    VersatileDiffusionTextToImagePipeline RePaintPipeline AudioDiffusionPipeline SpectrogramDiffusionPipeline
    AnyFlowFARPipeline GlmImagePipeline LTX2DFRPipeline LTX2DFRTemporalRefinePipeline LTX2LatentUpsamplePipeline
    LTX2VideoDiffusionDecodePipeline LTXLatentUpsamplePipeline SanaWMLTX2Refiner FluxPriorReduxPipeline
    RFD4ProteinaPipeline DiffusionGemmaPipeline LLaDA2Pipeline KarrasVePipeline ScoreSdeVePipeline
    """
IRREGULAR = frozenset(_IRREGULAR.split())

# Names that pipelines and guiders give to `cache_context`. "cond_uncond" is missing: it holds a whole batch.
CONTEXTS: dict[str, str] = {
    "cond": "cond",
    "uncond": "uncond",
    "pred_cond": "cond",
    "pred_uncond": "uncond",
    "pred_cond_skip": "perturbed",
    "pred_cond_seg": "perturbed",
    "pred_cond_stg": "perturbed",
    "uncond_stg": "perturbed",
    "pred_cond_modality": "isolated",
    "uncond_modality": "isolated",
}


def branches(pipe: Any, factor: int, call: int = 0) -> Branches | None:
    """The guidance branches in a denoiser batch that is `factor` times the images, in the order of its blocks.

    `call` counts the denoiser calls of this step, from 0; only pipelines that call once per branch need it. Ask while
    the pipeline is being called: PAG's answer depends on the call's `pag_scale`. None: not known, so take the batch
    for one branch and report it.
    """
    guidance = _guidance(type(pipe))
    if guidance is None:
        return None
    if factor == 1:
        return guidance.calls[call : call + 1] or None
    found = guidance.batched.get(factor)
    return found(pipe) if callable(found) else found


def _guidance(cls: type) -> Guidance | None:
    """By the class that defines the loop: a subclass with a `__call__` of its own may order branches as it likes."""
    for base in cls.__mro__:
        if base.__name__ in BRANCHES:
            return BRANCHES[base.__name__]
        if "__call__" in vars(base) and not base.__module__.startswith("fewstep"):
            return None
    return None


# ---------------------------------------------------------------------------------------------- rows of a call

# Where an argument keeps its rows: a dimension (of each tensor in it, however nested); EACH, a sequence with one
# entry per row; FRAMES, rows times frames folded into dimension 0, frames fastest; SHARED, one for all rows.
Place = int | Literal["each", "frames", "shared"]
EACH, FRAMES, SHARED = "each", "frames", "shared"

_IDS: dict[str, Place] = {"img_ids": SHARED, "txt_ids": SHARED}  # a leading dimension, if any, is dropped by the model
_ROTARY: dict[str, Place] = {"image_rotary_emb": SHARED}

_PLAIN = """
    UNet1DModel UNet2DModel UNet2DConditionModel UNet3DConditionModel UNetSpatioTemporalConditionModel I2VGenXLUNet
    Kandinsky3UNet StableCascadeUNet UNetControlNetXSModel PriorTransformer Transformer2DModel DiTTransformer2DModel
    PixArtTransformer2DModel SD3Transformer2DModel AuraFlowTransformer2DModel CogView3PlusTransformer2DModel
    LatteTransformer3DModel Lumina2Transformer2DModel SanaTransformer2DModel SanaVideoTransformer3DModel
    MochiTransformer3DModel HunyuanVideoTransformer3DModel HunyuanVideo15Transformer3DModel
    HunyuanImageTransformer2DModel WanTransformer3DModel WanAnimateTransformer3DModel ChronoEditTransformer3DModel
    EasyAnimateTransformer3DModel PRXTransformer2DModel StableAudio3DiTModel MotifVideoTransformer3DModel
    ControlNetModel MultiControlNetModel SD3ControlNetModel SD3MultiControlNetModel
"""

# What does *not* keep its rows in dimension 0, by denoiser class. The first argument of `forward` is the noisy sample.
_PLACES: dict[str, dict[str, Place]] = {
    "UNetMotionModel": {
        "encoder_hidden_states": FRAMES,  # the pipeline repeats the prompt for every frame
        "down_block_additional_residuals": FRAMES,
        "mid_block_additional_residual": FRAMES,
    },
    "FluxTransformer2DModel": _IDS,
    "FluxControlNetModel": _IDS,
    "FluxMultiControlNetModel": _IDS,
    "Flux2Transformer2DModel": _IDS,
    "ChromaTransformer2DModel": _IDS,
    "BriaTransformer2DModel": _IDS,
    "BriaFiboTransformer2DModel": _IDS,
    "LongCatImageTransformer2DModel": _IDS,
    "OvisImageTransformer2DModel": _IDS,
    "CogVideoXTransformer3DModel": {**_ROTARY, "ofs": SHARED},
    "ConsisIDTransformer3DModel": _ROTARY,
    "AllegroTransformer3DModel": _ROTARY,
    "HunyuanDiT2DModel": _ROTARY,
    "LuminaNextDiT2DModel": _ROTARY,
    "CogView4Transformer2DModel": _ROTARY,
    "StableAudioDiTModel": {"rotary_embedding": SHARED},
    "LTXVideoTransformer3DModel": {"rope_interpolation_scale": SHARED},
    "WanVACETransformer3DModel": {"control_hidden_states_scale": SHARED},  # one per layer
    "SkyReelsV2Transformer3DModel": {"fps": EACH},
    "CosmosTransformer3DModel": {"padding_mask": SHARED},
    "HiDreamImageTransformer2DModel": {"encoder_hidden_states_llama3": 1},  # layers first
    "Kandinsky5Transformer3DModel": {"visual_rope_pos": SHARED, "text_rope_pos": SHARED, "sparse_params": SHARED},
    "HunyuanVideoFramepackTransformer3DModel": {
        "indices_latents": SHARED,
        "indices_latents_clean": SHARED,
        "indices_latents_history_2x": SHARED,
        "indices_latents_history_4x": SHARED,
    },
    "QwenImageTransformer2DModel": {"img_shapes": EACH},
    "NucleusMoEImageTransformer2DModel": {"img_shapes": EACH},
    "ZImageTransformer2DModel": {"x": EACH, "cap_feats": EACH, "siglip_feats": EACH, "image_noise_mask": EACH},
}
ROW_ARGS: dict[str, dict[str, Place]] = {**{name: {} for name in _PLAIN.split()}, **_PLACES}


def rows_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The number of rows of a call `module(*args, **kwargs)`: images times guidance branches.

    Raises `Unsupported` for a class that `ROW_ARGS` does not list.
    """
    names, _ = _layout(module)
    sample = args[0] if args else kwargs[names[0]]
    return len(sample)


def size_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Of the noisy sample of a denoiser's call, without the rows."""
    names, _ = _layout(module)
    sample = args[0] if args else kwargs[names[0]]
    return tuple((sample if isinstance(sample, Tensor) else sample[0]).shape[1:])


def timestep_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The time argument of a denoiser's call as it was given, or None if it has none by a known name."""
    for name in ("timestep", "t"):
        if name in kwargs:
            return kwargs[name]
        names = _parameters(type(_bare(module)))
        if name in names and names.index(name) < len(args):
            return args[names.index(name)]
    return None


def take_rows(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], index: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the same call for the rows `index` alone (1-D, integer, repeats allowed), in that order.

    What is shared by all rows, or has one entry that is broadcast over them, is passed on as it is. The rows must be
    independent in the model: with PAG's attention processors, which split the batch in three, they are not.
    Raises `Unsupported` for a class that `ROW_ARGS` does not list, or an argument without its rows.
    """
    names, places = _layout(module)
    rows = rows_of(module, args, kwargs)

    def take(name: str, value: Any) -> Any:
        return _take(value, places.get(name, 0), index, rows, f"{type(_bare(module)).__name__}.forward({name})")

    gathered = tuple(take(name, value) for name, value in zip(names, args, strict=False))
    return gathered, {name: take(name, value) for name, value in kwargs.items()}


def _layout(module: nn.Module) -> tuple[tuple[str, ...], dict[str, Place]]:
    cls = type(_bare(module))
    places = _by_class(cls, ROW_ARGS)
    if places is None:
        raise Unsupported(
            f"fewstep does not know which arguments of {cls.__name__}.forward have a row per image: if all do, in "
            f"dimension 0, say fewstep.accel.anatomy.ROW_ARGS[{cls.__name__!r}] = {{}}, else name those that differ"
        )
    return _parameters(cls), places


@cache
def _parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """Of the class, not of the instance: there `forward` may be wrapped."""
    return tuple(signature(cls.forward).parameters)[1:]


def _take(value: Any, place: Place, index: Tensor, rows: int, where: str) -> Any:
    if place == SHARED or value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {name: _take(entry, place, index, rows, f"{where}[{name!r}]") for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        if place == EACH:
            return _take_each(value, index, rows, where)
        return type(value)(_take(entry, place, index, rows, where) for entry in value)
    if isinstance(value, Tensor):
        return _take_tensor(value, place, index, rows, where)
    raise Unsupported(f"{where} is a {type(value).__name__}: fewstep cannot take rows out of it")


def _take_each(value: list[Any] | tuple[Any, ...], index: Tensor, rows: int, where: str) -> Sequence[Any]:
    if len(value) == rows:
        return type(value)(value[i] for i in index.tolist())
    if all(entry == value[0] for entry in value):  # Qwen-Image: one per prompt, though each has several images
        return value
    raise Unsupported(f"{where} has {len(value)} entries for {rows} rows; its rows cannot be taken apart")


def _take_tensor(value: Tensor, place: Place, index: Tensor, rows: int, where: str) -> Tensor:
    dim = place if isinstance(place, int) else 0
    size = value.shape[dim] if value.ndim > dim else 1
    if size == 1 and (rows > 1 or value.ndim == 0):  # broadcast
        return value
    index = index.to(value.device)
    if size == rows:
        return value.index_select(dim, index)
    if place == FRAMES and size % rows == 0:
        frames = size // rows
        return value.unflatten(0, (rows, frames)).index_select(0, index).flatten(0, 1)
    raise Unsupported(f"{where} has {size} entries in dimension {dim} for {rows} rows; its rows cannot be taken apart")


# ---------------------------------------------------------------------------------------------- cross-attention

# The last name of the modules that read the text and nothing else, by denoiser class. None: text and image attend
# jointly, or there is no text. "attn1" of a UNet reads the text where `only_cross_attention` is set (upscalers).
_READERS: tuple[tuple[str, str], ...] = (
    (
        "attn2",
        """
        PixArtTransformer2DModel SanaTransformer2DModel SanaVideoTransformer3DModel HunyuanDiT2DModel
        LatteTransformer3DModel AllegroTransformer3DModel LTXVideoTransformer3DModel CosmosTransformer3DModel
        LuminaNextDiT2DModel StableAudioDiTModel WanTransformer3DModel WanVACETransformer3DModel
        WanAnimateTransformer3DModel SkyReelsV2Transformer3DModel ChronoEditTransformer3DModel
        """,
    ),
    (
        "attn1 attn2",
        """
        UNet2DConditionModel UNet3DConditionModel UNetMotionModel UNetSpatioTemporalConditionModel I2VGenXLUNet
        Transformer2DModel
        """,
    ),
    ("cross_attention", "Kandinsky5Transformer3DModel"),
    (
        "",
        """
        UNet1DModel UNet2DModel DiTTransformer2DModel SD3Transformer2DModel AuraFlowTransformer2DModel
        FluxTransformer2DModel Flux2Transformer2DModel ChromaTransformer2DModel BriaTransformer2DModel
        BriaFiboTransformer2DModel LongCatImageTransformer2DModel OvisImageTransformer2DModel
        CogVideoXTransformer3DModel ConsisIDTransformer3DModel CogView3PlusTransformer2DModel
        CogView4Transformer2DModel MochiTransformer3DModel HunyuanVideoTransformer3DModel
        HunyuanVideo15Transformer3DModel HunyuanVideoFramepackTransformer3DModel HunyuanImageTransformer2DModel
        HiDreamImageTransformer2DModel Lumina2Transformer2DModel QwenImageTransformer2DModel
        ZImageTransformer2DModel EasyAnimateTransformer3DModel PRXTransformer2DModel
        """,
    ),
)

CROSS_ATTENTION: dict[str, tuple[str, ...]] = {
    name: tuple(readers.split()) for readers, names in _READERS for name in names.split()
}


def cross_attention(denoiser: nn.Module) -> list[nn.Module]:
    """The attention modules whose `encoder_hidden_states` is the text, in the order of the module tree.

    Empty where text and image attend jointly (Flux, SD3), so that the text changes from layer to layer. The temporal
    layers of a video UNet, whose "attn2" attends to themselves, are not among them.
    Raises `Unsupported` for a class that `CROSS_ATTENTION` does not list.
    """
    bare = _bare(denoiser)
    names = _by_class(type(bare), CROSS_ATTENTION)
    if names is None:
        raise Unsupported(f"fewstep does not know which attention of {type(bare).__name__} reads the text")
    found = (module for path, module in bare.named_modules() if path.rpartition(".")[2] in names)
    return [module for module in found if getattr(module, "is_cross_attention", True)]
