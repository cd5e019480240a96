"""Encoded media to what processors take; raises `Reject` for bytes that cannot be decoded.

Decoders are imported when a medium of their kind comes, so that text needs none of them.
"""

import importlib
import io
from typing import Any

import numpy as np

from common.errors import ConfigError, Reject
from workers.prompt.source import Medium


def image_of(medium: Medium) -> Any:
    """Return the picture as a PIL image in RGB."""
    library = _library("PIL.Image", medium, "pillow")
    try:
        return library.open(io.BytesIO(medium.data)).convert("RGB")
    except (OSError, ValueError, SyntaxError, library.DecompressionBombError) as error:
        raise _undecodable(medium, error) from error


def sound_of(medium: Medium, sampling_rate: int) -> np.ndarray[Any, Any]:
    """Return the sound as float32 [samples], channels averaged. `sampling_rate`: what the model hears, in Hz."""
    library = _library("soundfile", medium, "soundfile")
    try:
        samples_TC, rate = library.read(io.BytesIO(medium.data), dtype="float32", always_2d=True)
    except library.SoundFileError as error:
        raise _undecodable(medium, error) from error
    if rate != sampling_rate:
        raise Reject(f"audio {medium.hash} has {rate} Hz, the model hears {sampling_rate} Hz: resample the file")
    return samples_TC.mean(axis=1)


def clip_of(medium: Medium) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """Return (uint8 frames [time, height, width, RGB], what processors want to know: frames, rate and seconds)."""
    library = _library("av", medium, "av")
    try:
        with library.open(io.BytesIO(medium.data)) as container:
            rate = float(container.streams.video[0].average_rate or 0)
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    except (library.FFmpegError, IndexError) as error:
        raise _undecodable(medium, error) from error
    if not frames or rate <= 0:
        raise Reject(f"video {medium.hash} ({medium.format}) holds {len(frames)} frames at {rate} a second")
    facts = {"total_num_frames": len(frames), "fps": rate, "duration": len(frames) / rate}
    return np.stack(frames), {**facts, "height": frames[0].shape[0], "width": frames[0].shape[1]}


def _library(name: str, medium: Medium, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"the data hold {medium.kind}, which needs a package: pip install {package}") from error


def _undecodable(medium: Medium, error: BaseException) -> Reject:
    return Reject(f"{medium.kind} {medium.hash} ({medium.format}, {len(medium.data)} bytes) cannot be decoded: {error}")
