"""Windows and tokens of a sound, as a Whisper-like encoder's processor cuts it (transformers 5.19).

models/whisper/feature_extraction_whisper.py: 16,000 samples a second, a frame of mels each 160, padded to
windows of 30 s. Qwen2-Audio (models/qwen2_audio/processing_qwen2_audio.py) cuts longer sounds off and
gives tokens to what is not padding; Voxtral (models/voxtral/processing_voxtral.py) takes several windows whole.
"""

from math import ceil

from planner.errors import UsageError
from planner.models.images import Cutting
from planner.models.vision_spec import AudioSpec

SAMPLES_S = 16_000
HOP = 160
MAX_SECONDS = 24 * 3600


def cut_sound(audio: AudioSpec, seconds: float) -> Cutting:
    """Return one sound's rows and tokens; raises UsageError for no sound at all."""
    samples = int(seconds * SAMPLES_S)
    if samples < HOP or seconds > MAX_SECONDS:
        raise UsageError(
            f"audio_seconds: {seconds:g} is not a sound's length",
            hint=f"seconds, from {HOP / SAMPLES_S} to {MAX_SECONDS}",
        )
    frames = audio.window_s * SAMPLES_S // HOP
    if audio.whole_windows:
        windows = ceil(samples / (audio.window_s * SAMPLES_S))
        tokens = windows * audio.positions // audio.pool
        said = f"{seconds:g} s in {windows} windows of {audio.window_s} s"
    else:
        windows = 1
        heard = min(frames, ceil(samples / HOP))
        rows = (heard - 1) // 2 + 1  # the second convolution's stride
        tokens = max(0, (rows - 2) // audio.pool + 1)
        said = f"{seconds:g} s padded to {audio.window_s} s"
        if heard == frames and samples > audio.window_s * SAMPLES_S:
            said = f"{seconds:g} s cut off at {audio.window_s} s"
    return Cutting(
        patches=windows * audio.positions,
        tokens=tokens,
        pixels=windows * frames * audio.mels,
        said=said,
        sequences=windows,
        features=windows * audio.positions // audio.pool,
    )
