# ruff: noqa: E501
"""The networks of `packages.py`: how to build each without pretrained weights, and an input; `x` is 1x3x64x64."""

from __future__ import annotations

from typing import NamedTuple


class Network(NamedTuple):
    package: str
    name: str
    imports: str
    build: str
    example: str


NETWORKS: list[Network] = []


def add(package: str, imports: str, example: str = "x", **builds: str) -> None:
    """Networks of one package with the same imports and input, by name."""
    NETWORKS.extend(Network(package, name, imports, build, example) for name, build in builds.items())


# Detection
YOLO = "import os\nos.environ.setdefault('YOLO_CONFIG_DIR', '/tmp/yolo')\nfrom ultralytics.nn.tasks import *"
for name in ("yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n"):
    add("ultralytics", YOLO, **{name: f"DetectionModel('{name}.yaml', verbose=False)"})
add(
    "ultralytics", YOLO, "x",
    **{
        "yolov8n-seg": "SegmentationModel('yolov8n-seg.yaml', verbose=False)",
        "yolov8n-pose": "PoseModel('yolov8n-pose.yaml', verbose=False)",
        "yolov8n-obb": "OBBModel('yolov8n-obb.yaml', verbose=False)",
        "yolo11n-cls": "ClassificationModel('yolo11n-cls.yaml', verbose=False)",
        "yolov8n-ghost": "DetectionModel('yolov8n-ghost.yaml', verbose=False)",
        "yolov8s-world": "WorldModel('yolov8s-world.yaml', verbose=False)",
    },
)  # fmt: skip

# Segmentation
SMP = "import segmentation_models_pytorch as smp"
for name in (
    "Unet",
    "UnetPlusPlus",
    "MAnet",
    "Linknet",
    "FPN",
    "PSPNet",
    "PAN",
    "DeepLabV3",
    "DeepLabV3Plus",
    "UPerNet",
):
    add("segmentation-models-pytorch", SMP, "torch.randn(1, 3, 128, 128)", **{
        f"{name} resnet18": f"smp.{name}('resnet18', encoder_weights=None, classes=2)",
    })  # fmt: skip
for name in ("mobilenet_v2", "efficientnet-b0", "densenet121", "vgg11_bn", "timm-regnetx_002", "mit_b0", "xception",
             "timm-mobilenetv3_small_100", "mobileone_s0", "dpn68", "inceptionv4", "se_resnet50"):  # fmt: skip
    add("segmentation-models-pytorch", SMP, "torch.randn(1, 3, 128, 128)", **{
        f"Unet {name}": f"smp.Unet('{name}', encoder_weights=None, classes=2)",
    })  # fmt: skip
add("segmentation-models-pytorch", SMP, "torch.randn(1, 3, 128, 128)",
    Segformer="smp.Segformer('mit_b0', encoder_weights=None, classes=2)")  # fmt: skip

# Medicine, 3-D
MONAI = "from monai.networks.nets import *"
VOLUME = "torch.randn(1, 1, 32, 32, 32)"
add(
    "monai", MONAI, VOLUME,
    UNet="UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=2)",
    AttentionUnet="AttentionUnet(3, 1, 2, (8, 16, 32), (2, 2))",
    BasicUNet="BasicUNet(3, 1, 2, (8, 8, 16, 32, 64, 8))",
    BasicUNetPlusPlus="BasicUNetPlusPlus(3, 1, 2, (8, 8, 16, 32, 64, 8))",
    SegResNet="SegResNet(3, 8, 1, 2)",
    SegResNetDS="SegResNetDS(3, 8, 1, 2, blocks_down=(1, 2, 2))",
    SegResNetVAE="SegResNetVAE((32, 32, 32), spatial_dims=3, init_filters=8, in_channels=1, out_channels=2)",
    DynUNet="DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32])",
    VNet="VNet(3, 1, 2)",
    HighResNet="HighResNet(3, 1, 2)",
    DenseNet121="DenseNet121(spatial_dims=3, in_channels=1, out_channels=2)",
    resnet18="resnet18(spatial_dims=3, n_input_channels=1, num_classes=2)",
    SEResNet50="SEResNet50(spatial_dims=3, in_channels=1, num_classes=2)",
    EfficientNet="EfficientNetBN('efficientnet-b0', spatial_dims=3, in_channels=1, num_classes=2, pretrained=False)",
    AutoEncoder="AutoEncoder(3, 1, 1, (8, 16, 32), (2, 2, 2))",
    AutoencoderKL="AutoencoderKL(3, 1, 1, (1, 1), (16, 32), (False, False), 3, 8)",
    UNETR="UNETR(1, 2, (32, 32, 32), 8, 48, 96, 4)",
    RegUNet="RegUNet(3, 1, 8, 2)",
)  # fmt: skip
add("monai", MONAI, "torch.randn(1, 3, 64, 64)",
    FlexibleUNet="FlexibleUNet(3, 2, 'efficientnet-b0', pretrained=False)",
    ViT="ViT(3, 64, 16, hidden_size=48, mlp_dim=96, num_layers=2, num_heads=4, classification=True, spatial_dims=2)",
    PatchDiscriminator="PatchDiscriminator(2, 16, 3)")  # fmt: skip
add("dynamic-network-architectures", "from dynamic_network_architectures.architectures.unet import *", VOLUME,
    PlainConvUNet="PlainConvUNet(1, 3, [8, 16, 32], nn.Conv3d, 3, [1, 2, 2], 2, 2, 2, conv_bias=True, norm_op=nn.InstanceNorm3d,"
    " norm_op_kwargs={'affine': True}, nonlin=nn.LeakyReLU)",
    ResidualEncoderUNet="ResidualEncoderUNet(1, 3, [8, 16, 32], nn.Conv3d, 3, [1, 2, 2], 2, 2, 2, conv_bias=True,"
    " norm_op=nn.InstanceNorm3d, norm_op_kwargs={'affine': True}, nonlin=nn.LeakyReLU)")  # fmt: skip
add("torchxrayvision", "import torchxrayvision as xrv", "torch.randn(1, 1, 224, 224)",
    DenseNet="xrv.models.DenseNet(weights=None)")  # fmt: skip

# Backbones
for name in ("resnet18", "mobilenetv3_small_100", "efficientnet_b0", "regnety_002", "hrnet_w18_small", "dla34",
             "densenet121", "vgg11_bn", "cspresnet50", "ghostnet_100", "repvgg_a0", "mobileone_s0", "convnext_atto",
             "rexnet_100", "res2net50_14w_8s", "resnest14d", "fbnetc_100", "mnasnet_small", "tf_efficientnetv2_b0",
             "xception41"):  # fmt: skip
    add("timm", "import timm", **{f"{name} features_only": f"timm.create_model('{name}', features_only=True)"})
add("efficientnet_pytorch", "from efficientnet_pytorch import EfficientNet",
    **{"efficientnet-b0": "EfficientNet.from_name('efficientnet-b0')"})  # fmt: skip
add("pretrainedmodels", "import pretrainedmodels as p", "torch.randn(1, 3, 224, 224)",
    se_resnet50="p.se_resnet50(pretrained=None)", xception="p.xception(pretrained=None)",
    dpn68="p.dpn68(pretrained=None)", bninception="p.bninception(pretrained=None)",
    nasnetamobile="p.nasnetamobile(pretrained=None)",
    fbresnet152="p.fbresnet152(pretrained=None)")  # fmt: skip
add("resnest", "from resnest.torch import resnest50", resnest50="resnest50(pretrained=False)")
add("facenet-pytorch", "from facenet_pytorch import *", "torch.randn(1, 3, 160, 160)",
    InceptionResnetV1="InceptionResnetV1(pretrained=None, classify=True, num_classes=10)")  # fmt: skip
add("vit-pytorch", "import vit_pytorch as v\nfrom vit_pytorch import *",
    ViT="v.ViT(image_size=64, patch_size=16, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128)",
    SimpleViT="v.SimpleViT(image_size=64, patch_size=16, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128)")  # fmt: skip
add("vit-pytorch", "from vit_pytorch.cct import CCT\nfrom vit_pytorch.mobile_vit import MobileViT",
    CCT="CCT(img_size=(64, 64), embedding_dim=64, num_layers=2, num_heads=4, mlp_ratio=2, num_classes=10)",
    MobileViT="MobileViT((64, 64), [16, 24, 32], [16, 16, 24, 24, 32, 32, 40, 40, 48, 48, 96], 10)")  # fmt: skip
add("open_clip_torch", "import open_clip", "torch.randn(1, 3, 224, 224)",
    **{"RN50 visual": "open_clip.create_model('RN50', pretrained=None).visual",
       "ViT-B-32 visual": "open_clip.create_model('ViT-B-32', pretrained=None).visual"})  # fmt: skip

# Transformers' vision models
T = "import transformers as t"
add(
    "transformers", T, "torch.randn(1, 3, 64, 64)",
    ResNet="t.ResNetForImageClassification(t.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2]))",
    RegNet="t.RegNetForImageClassification(t.RegNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], groups_width=16))",
    ConvNext="t.ConvNextForImageClassification(t.ConvNextConfig(hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1]))",
    ConvNextV2="t.ConvNextV2ForImageClassification(t.ConvNextV2Config(hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1]))",
    MobileNetV1="t.MobileNetV1ForImageClassification(t.MobileNetV1Config(depth_multiplier=0.25))",
    MobileNetV2="t.MobileNetV2ForImageClassification(t.MobileNetV2Config(depth_multiplier=0.5))",
    EfficientNet="t.EfficientNetForImageClassification(t.EfficientNetConfig(width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640))",
    MobileViT="t.MobileViTForImageClassification(t.MobileViTConfig(image_size=64))",
    Segformer="t.SegformerForSemanticSegmentation(t.SegformerConfig(hidden_sizes=[16, 32, 64, 64]))",
    PoolFormer="t.PoolFormerForImageClassification(t.PoolFormerConfig(hidden_sizes=[16, 32, 64, 64]))",
    ViT="t.ViTForImageClassification(t.ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=64))",
    DeiT="t.DeiTForImageClassification(t.DeiTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=64))",
    Swin="t.SwinForImageClassification(t.SwinConfig(embed_dim=24, depths=[2, 2], num_heads=[2, 4], image_size=64, window_size=4))",
    LeViT="t.LevitForImageClassification(t.LevitConfig(image_size=64, hidden_sizes=[64, 96, 128]))",
    FocalNet="t.FocalNetForImageClassification(t.FocalNetConfig(image_size=64, embed_dim=24, depths=[2, 2]))",
    BiT="t.BitForImageClassification(t.BitConfig(embedding_size=16, hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 1, 1], num_groups=8))",
    HGNetV2="t.HGNetV2ForImageClassification(t.HGNetV2Config())",
)  # fmt: skip
add("transformers", T, "torch.randn(1, 16000)",
    Wav2Vec2="t.Wav2Vec2Model(t.Wav2Vec2Config(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, conv_dim=[32]*7))",
    Hubert="t.HubertModel(t.HubertConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, conv_dim=[32]*7))")  # fmt: skip

# Diffusion
D = "import diffusers as d"
BLOCKS = "block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8"
add(
    "diffusers", D, "x",
    AutoencoderKL=f"d.AutoencoderKL(down_block_types=('DownEncoderBlock2D',)*2, up_block_types=('UpDecoderBlock2D',)*2, {BLOCKS})",
    AutoencoderTiny="d.AutoencoderTiny(encoder_block_out_channels=(16,)*4, decoder_block_out_channels=(16,)*4)",
    VQModel=f"d.VQModel(down_block_types=('DownEncoderBlock2D',)*2, up_block_types=('UpDecoderBlock2D',)*2, {BLOCKS})",
)  # fmt: skip
add(
    "diffusers",
    D,
    "(x, 10)",
    UNet2DModel=f"d.UNet2DModel(64, down_block_types=('DownBlock2D', 'AttnDownBlock2D'), up_block_types=('AttnUpBlock2D', 'UpBlock2D'), {BLOCKS})",
)
add(
    "diffusers",
    D,
    "(torch.randn(1, 4, 16, 16), 10, torch.randn(1, 7, 32))",
    UNet2DConditionModel="d.UNet2DConditionModel(16, down_block_types=('CrossAttnDownBlock2D', 'DownBlock2D'), up_block_types=('UpBlock2D', 'CrossAttnUpBlock2D'), "
    f"cross_attention_dim=32, attention_head_dim=8, {BLOCKS})",
)
add(
    "denoising-diffusion-pytorch",
    "from denoising_diffusion_pytorch import Unet",
    "(x, torch.tensor([10]))",
    Unet="Unet(32, dim_mults=(1, 2, 4), flash_attn=False)",
)

# Restoration
for folder, name, call in (
    ("ESRGAN", "RRDBNet", "a.ESRGAN(num_filters=16, num_blocks=2)"),
    ("SPAN", "SPAN", "a.SPAN(num_in_ch=3, num_out_ch=3, feature_channels=16)"),
    ("NAFNet", "NAFNet", "a.NAFNet(width=16, middle_blk_num=1, enc_blk_nums=[1, 1], dec_blk_nums=[1, 1])"),
    ("RCAN", "RCAN", "a.RCAN(n_resgroups=2, n_resblocks=2, n_feats=16, reduction=4)"),
    ("SAFMN", "SAFMN", "a.SAFMN(dim=16, n_blocks=2)"),
    ("PLKSR", "PLKSR", "a.PLKSR(dim=16, n_blocks=2)"),
    ("RealCUGAN", "UpCunet2x", "a.UpCunet2x()"),
    ("DnCNN", "DnCNN", "a.DnCNN(in_nc=3, out_nc=3, nc=16, nb=6)"),
    ("DRUNet", "DRUNet", "a.DRUNet(in_nc=4, out_nc=3, nc=[16, 32, 48, 64], nb=1)"),
    ("SwiftSRGAN", "SwiftSRGAN", "a.SwiftSRGAN(num_channels=16, num_blocks=2)"),
    ("MoSR", "MoSR", "a.MoSR(n_block=2, dim=16)"),
    ("OmniSR", "OmniSR", "a.OmniSR(num_feat=16, res_num=1)"),
    ("SwinIR", "SwinIR", "a.SwinIR(embed_dim=24, depths=[2], num_heads=[4], window_size=8, img_size=64)"),
    ("KBNet", "KBNet_s", "a.KBNet_s(width=16, middle_blk_num=1, enc_blk_nums=[1, 1], dec_blk_nums=[1, 1])"),
    ("MixDehazeNet", "MixDehazeNet", "a.MixDehazeNet(embed_dims=[8, 16, 32, 16, 8], depths=[1]*5)"),
):  # fmt: skip
    add("spandrel", f"from spandrel.architectures import {folder} as a",
        "torch.randn(1, 4, 64, 64)" if folder == "DRUNet" else "x",
        **{name: call})  # fmt: skip
add(
    "kornia",
    "import kornia.models as m\nfrom kornia.feature import HardNet, TFeat, SOSNet, KeyNet, HyNet",
    "torch.randn(2, 1, 32, 32)",
    HardNet="HardNet(False)",
    SOSNet="SOSNet(False)",
    TFeat="TFeat(False)",
    HyNet="HyNet(False)",
)
add(
    "kornia",
    "try:\n    from kornia.models.dexined import DexiNed\nexcept ImportError:\n    from kornia.filters.dexined import DexiNed",
    DexiNed="DexiNed(pretrained=False)",
)
add("kornia", "from kornia.feature import DISK", DISK="DISK().unet")
add(
    "lpips",
    "import lpips",
    "(x, torch.randn(1, 3, 64, 64))",
    alex="lpips.LPIPS(pretrained=False, net='alex', pnet_rand=True, verbose=False)",
)
add(
    "basicsr",
    "import sys, torchvision.transforms.functional as f\nsys.modules['torchvision.transforms.functional_tensor'] = f\n"
    "from basicsr.archs.edsr_arch import EDSR\nfrom basicsr.archs.rrdbnet_arch import RRDBNet\nfrom basicsr.archs.srresnet_arch import MSRResNet\n"
    "",
    EDSR="EDSR(3, 3, 16, 2)",
    MSRResNet="MSRResNet(3, 3, 16, 2)",
    RRDBNet="RRDBNet(3, 3, num_feat=16, num_block=2, num_grow_ch=8)",
)
add(
    "super-image",
    "from super_image import *",
    EDSR="EdsrModel(EdsrConfig(scale=2, n_feats=16, n_resblocks=2))",
    CARN="CarnModel(CarnConfig(scale=2))",
    MSRN="MsrnModel(MsrnConfig(scale=2))",
)

# Text in pictures
add(
    "python-doctr",
    "from doctr.models import *",
    "torch.rand(1, 3, 32, 128)",
    vgg16_bn_r="classification.vgg16_bn_r(pretrained=False)",
    mobilenet_v3_small="classification.mobilenet_v3_small(pretrained=False)",
    resnet31="classification.resnet31(pretrained=False)",
)
add(
    "python-doctr",
    "from doctr.models import *",
    "torch.rand(1, 3, 128, 128)",
    db_mobilenet="db_mobilenet_v3_large(pretrained=False, pretrained_backbone=False, exportable=True)",
    fast_tiny="fast_tiny(pretrained=False, pretrained_backbone=False, exportable=True)",
)
add(
    "easyocr",
    "from easyocr.craft import CRAFT\nfrom easyocr.model.vgg_model import Model",
    "torch.randn(1, 3, 64, 64)",
    CRAFT="CRAFT(pretrained=False)",
)
add(
    "easyocr",
    "from easyocr.model.vgg_model import Model",
    "(torch.randn(1, 1, 32, 64), torch.zeros(1, 10))",
    recogniser="Model(1, 32, 32, 20)",
)

# Sound
add(
    "torchaudio",
    "import torchaudio.models as m",
    "torch.randn(1, 1, 16000)",
    M5="m.wav2letter.Wav2Letter(20, 'waveform', 1)",
)
add("torchaudio", "import torchaudio.models as m", "torch.randn(1, 1, 4000)", ConvTasNet="m.ConvTasNet(2)")
add("torchaudio", "import torchaudio.models as m", "torch.randn(1, 2, 8192)", HDemucs="m.hdemucs_low(['a', 'b'])")
add(
    "torchaudio",
    "import torchaudio.models as m",
    "(torch.randn(1, 1, 1100), torch.randn(1, 1, 80, 8))",
    WaveRNN="m.WaveRNN([5, 5, 11], 16, 275, 1, 16, 16, 5, 80, 16, 16)",
)
add(
    "torchaudio",
    "import torchaudio.models as m",
    "(torch.randn(1, 40, 80), torch.tensor([40]))",
    Conformer="m.Conformer(80, 4, 128, 2, 31)",
)
add("torchaudio", "import torchaudio.models as m", "torch.randn(1, 40, 80)", DeepSpeech="m.DeepSpeech(80, 32, 20)")
QUIET = """
from speechbrain.nnet.pooling import StatisticsPooling
StatisticsPooling._get_gauss_noise = lambda self, shape, device="cpu": torch.zeros(shape, dtype=torch.float64)
"""
"""Without the noise that a layer adds in every pass, which would differ between two networks."""
SB = "from speechbrain.lobes.models.{} import *"
add(
    "speechbrain",
    SB.format("ECAPA_TDNN"),
    "torch.randn(1, 50, 80)",
    ECAPA_TDNN="ECAPA_TDNN(80, channels=[32, 32, 32, 32, 96], attention_channels=16, lin_neurons=16)",
)
add(
    "speechbrain",
    SB.format("Xvector") + QUIET,
    "torch.randn(1, 50, 40)",
    Xvector="Xvector(in_channels=40, tdnn_channels=[32, 32, 32, 32, 64], lin_neurons=32)",
)
add(
    "speechbrain",
    SB.format("CRDNN"),
    "torch.randn(1, 40, 40)",
    CRDNN="CRDNN(input_shape=[None, None, 40], cnn_channels=(16, 16), rnn_neurons=32, dnn_neurons=32)",
)
add(
    "speechbrain",
    SB.format("HifiGAN"),
    "torch.randn(1, 80, 16)",
    HiFiGAN="HifiganGenerator(80, 1, '1', [[1, 3, 5]]*3, [3, 7, 11], [16, 16, 4], 32, [8, 8, 2])",
)
PLAIN = """
from torch.nn.utils import parametrize, remove_weight_norm
def plain(model):
    for module in model.modules():
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
        elif hasattr(module, "weight_g"):
            remove_weight_norm(module)
    return model
"""
"""Without weight norm."""
add(
    "speechbrain",
    SB.format("HifiGAN") + PLAIN,
    "torch.randn(1, 80, 16)",
    **{
        "HiFiGAN without weight norm": "plain(HifiganGenerator(80, 1, '1', [[1, 3, 5]]*3, [3, 7, 11], [16, 16, 4], 32, "
        "[8, 8, 2]))"
    },
)
add(
    "asteroid",
    "from asteroid.models import *",
    "torch.randn(1, 8000)",
    ConvTasNet="ConvTasNet(2, n_filters=32, bn_chan=16, hid_chan=32, skip_chan=16, n_blocks=2, n_repeats=1)",
    DPRNNTasNet="DPRNNTasNet(2, n_filters=16, bn_chan=16, hid_size=16, n_repeats=1)",
    SuDORMRFNet="SuDORMRFNet(2, bn_chan=16, num_blocks=1, upsampling_depth=2, n_filters=32)",
)
add(
    "demucs",
    "from demucs.demucs import Demucs\nfrom demucs.hdemucs import HDemucs",
    "torch.randn(1, 2, 8192)",
    Demucs="Demucs(['a', 'b'], channels=8, depth=4, lstm_layers=0)",
    HDemucs="HDemucs(['a', 'b'], channels=8)",
)
add("denoiser", "from denoiser.demucs import Demucs", "torch.randn(1, 1, 4000)", Demucs="Demucs(hidden=8, depth=3)")
add(
    "encodec",
    "from encodec import EncodecModel",
    "torch.randn(1, 1, 4800)",
    encoder="EncodecModel._get_model([6.], causal=False, model_norm='time_group_norm', audio_normalize=False).encoder",
)
ENCODEC = "EncodecModel._get_model([6.], causal=False, model_norm='weight_norm', audio_normalize=False).encoder"
add(
    "encodec",
    "from encodec import EncodecModel" + PLAIN,
    "torch.randn(1, 1, 4800)",
    **{"encoder with weight norm": ENCODEC, "encoder without weight norm": f"plain({ENCODEC})"},
)
add(
    "openunmix",
    "from openunmix.model import OpenUnmix",
    "torch.rand(1, 2, 65, 20)",
    OpenUnmix="OpenUnmix(65, 2, 32, 1)",
)

# EEG
EEG = "from braindecode.models import *"
for name in ("EEGNet", "ShallowFBCSPNet", "Deep4Net", "EEGInceptionERP", "EEGInceptionMI", "ATCNet",
             "EEGConformer", "TIDNet", "HybridNet", "SleepStagerChambon2018", "FBCNet", "EEGTCNet", "SPARCNet", "TSception",
             "EEGSimpleConv", "AttentionBaseNet", "MSVTNet", "CTNet", "SincShallowNet", "SyncNet", "EEGITNet"):  # fmt: skip
    add(
        "braindecode",
        EEG,
        "torch.randn(1, 22, 1000)",
        **{name: f"{name}(n_chans=22, n_outputs=4, n_times=1000, sfreq=250)"},
    )
