"""Models of this process: loading, and what trainer and engine must agree on.

Importing this package makes transformers importable: a published torchvision build does not load its C++ operators
beside a CPU build of torch, its import then fails, and with it every import from transformers. The two operators that
the import looks for are declared here, without an implementation, before transformers is imported anywhere below.
"""

import importlib.util
import warnings

import torch


def _declare_torchvision_operators() -> None:
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        with warnings.catch_warnings():
            # The image decoders are missing in the same case; nothing here decodes through torchvision.
            warnings.simplefilter("ignore")
            importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_declare_torchvision_operators()
