"""Small networks of `models.nets`, with the topology of well-known ones."""

from models.zoo.model import Model

OWN = {
    f"torchhalo {title}": Model(f"models.nets:{function}", (shape,), {})
    for title, function, shape in [
        ("ResNet-50", "ResNet50", (2, 3, 96, 88)),
        ("DenseNet", "DenseNet", (2, 3, 96, 88)),
        ("EfficientNet", "EfficientNet", (2, 3, 96, 88)),
        ("ConvNeXt", "ConvNeXt", (2, 3, 96, 96)),
        ("HRNet", "HRNet", (1, 3, 96, 96)),
        ("DeepLabV3", "deeplab_v3", (2, 3, 72, 66)),
        ("FPN", "FPN", (1, 3, 96, 88)),
        ("PSPNet", "pspnet", (2, 3, 72, 66)),
    ]
}
