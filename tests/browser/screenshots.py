"""Pictures of every page in both themes and at phone width: `make screenshots`.

    python tests/browser/screenshots.py OUT_DIR

Starts the app, fills each page in, writes OUT_DIR/PAGE-THEME.png; small palette PNGs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.browser.driving import go, open_browser, running_app, settle

SIZES = {
    "light": ({"width": 1280, "height": 1000}, "light"),
    "dark": ({"width": 1280, "height": 1000}, "dark"),
    "phone": ({"width": 390, "height": 844}, "light"),
}
PICTURES = {
    "will-it-fit": "?model=llama-3.1-8b&framework=trl&method=lora&context=8192&batch=4",
    "serve": "serve?model=llama-3.1-8b&gpu=rtx-4090&context=32768",
    "recommend": "recommend?gpu=rtx-4090-laptop",
    "budget": "budget?model=llama-3.1-8b&context=4096&accumulation=16",
    "gpus": "recommend?look_for=GPUs+for+my+model&model=llama-3.1-8b&context=8192",
    "compare": "compare?model=llama-3.1-8b&context=4096",
    "published": "compare?compare=510.8+GB+to+54.3+GB",
    "recording": "recording",
    "explain": "explain",
    "accuracy": "accuracy",
}
TRACED = ("--method", "lora", "--context", "1024", "--gpu", "rtx-4090", "--layers", "4")
COLOURS = 192
"""A third of the bytes, and every term keeps its exact colour."""


def example_recording(folder: Path) -> Path:
    """Trace a real training step of a small model on fake tensors; return the recording's path."""
    path = folder / "recording.json"
    command = [sys.executable, "-m", "app.cli", "trace", "qwen2.5-0.5b", *TRACED]
    subprocess.run([*command, "--save", str(path)], check=True, stdout=subprocess.DEVNULL)
    return path


def prepare(page: Any, name: str, recording: Path) -> None:
    """Do on a page what its picture should show."""
    if name == "recording":
        page.locator(".st-key-recording_file input[type=file]").set_input_files(str(recording))
        page.locator('[data-testid="stMetric"]').first.wait_for()
    elif name == "explain":
        page.locator(".st-key-example button").first.click()
        page.get_by_role("heading", name="What to change").wait_for()
    settle(page)


def smaller(path: Path) -> None:
    """Reduce a picture to a palette: what is flat keeps its colour, edges of letters take the nearest."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    found, places, counts = np.unique(
        pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    places = places.reshape(pixels.shape[:2])
    flat = (places[:-1, :-1] == places[1:, :-1]) & (places[:-1, :-1] == places[:-1, 1:])
    flats = np.bincount(places[:-1, :-1][flat], minlength=len(found))
    common = found[np.lexsort((-counts, -flats))[:COLOURS]]
    far = ((found[:, None, :].astype(int) - common[None, :, :]) ** 2).sum(axis=2)
    nearest = far.argmin(axis=1).astype(np.uint8)
    reduced = Image.fromarray(nearest[places], mode="P")
    reduced.putpalette(common.tobytes())
    reduced.save(path, optimize=True)


def take(out: Path) -> None:
    """Write every picture."""
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_app() as address,
        open_browser() as browser,
    ):
        recording = example_recording(Path(folder))
        for size, (viewport, scheme) in SIZES.items():
            context = browser.new_context(viewport=viewport, color_scheme=scheme)
            for name, path in PICTURES.items():
                page = context.new_page()
                go(page, f"{address}/{path}")
                prepare(page, name, recording)
                file = out / f"{name}-{size}.png"
                page.screenshot(path=str(file))
                smaller(file)
                page.close()
            context.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/browser/screenshots.py OUT_DIR")
    take(Path(sys.argv[1]))
    print(json.dumps({"pictures": len(SIZES) * len(PICTURES)}))
