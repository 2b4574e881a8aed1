"""One file as an image: every format, depth and colour, and what is refused with which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pictures import dicom, pixels, png, png16, save, tiff16
from PIL import Image

from crad_p2p.data.own import formats
from crad_p2p.data.own.formats import render_array, render_file
from crad_p2p.data.own.rendering import Rendering, UnreadableError

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")

#: As large as the pictures, so that pixels stay what they are.
SAME = 8
COLOUR, GREY = Rendering(SAME, 3), Rendering(SAME, 1)


def small(seed: int = 0, *, channels: int = 3, dtype: type = np.uint8, below: int | None = None) -> np.ndarray:
    shape = (SAME, SAME, channels) if channels > 1 else (SAME, SAME)
    return pixels(seed, *shape, dtype=dtype, below=below)


def read(path: Path, rendering: Rendering = COLOUR) -> np.ndarray:
    image = render_file(path, rendering)[1]
    assert image.dtype == np.uint8
    assert image.shape == rendering.shape
    assert image.flags.c_contiguous
    return image


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refusal(path: Path, rendering: Rendering = COLOUR) -> str:
    with pytest.raises(UnreadableError) as caught:
        render_file(path, rendering)
    return str(caught.value)


def scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """What a window makes of values, by the book."""
    return np.rint(np.clip((values.astype(np.float64) - low) / (high - low) * 255, 0, 255)).astype(np.uint8)


# --- 8 bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.tiff", "a.jpg", "without-an-ending"])
def test_colour_of_eight_bits(tmp_path: Path, name: str) -> None:
    array = small()
    path = save(tmp_path / name, array, **({} if "." in name else {"format": "PNG"}))
    if name == "a.jpg":
        array = np.asarray(Image.open(path))
    np.testing.assert_array_equal(read(path), array.transpose(2, 0, 1))


def test_grey_is_repeated_and_colour_becomes_luma(tmp_path: Path) -> None:
    grey, colour = small(channels=1), small(1)
    found = read(save(tmp_path / "grey.png", grey))
    for channel in found:
        np.testing.assert_array_equal(channel, grey)
    luma = read(save(tmp_path / "colour.png", colour), GREY)[0]
    np.testing.assert_array_equal(luma, np.asarray(Image.fromarray(colour).convert("L")))


def test_palettes_transparency_bits_and_inks_are_colours_like_any_other(tmp_path: Path) -> None:
    colour = Image.fromarray(small())
    for mode in ("P", "RGBA", "CMYK", "1", "LA"):
        picture = colour.convert(mode)
        path = tmp_path / f"{mode}.{'tif' if mode == 'CMYK' else 'png'}"
        picture.save(path)
        expected = np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
        np.testing.assert_array_equal(read(path), expected, err_msg=mode)


def test_any_size_is_scaled_to_the_square_without_its_aspect(tmp_path: Path) -> None:
    wide = np.zeros((40, 400), np.uint8)
    wide[:, ::2] = 255  # stripes that scaling without antialiasing would keep
    found = read(save(tmp_path / "wide.png", wide), GREY)
    assert found.shape == (1, SAME, SAME)
    assert abs(found.astype(int) - 127).max() <= 3
    large = read(save(tmp_path / "small.png", pixels(3, 2, 3)), COLOUR)  # made larger, too
    assert large.shape == (3, SAME, SAME)


def test_a_photograph_stands_upright(tmp_path: Path) -> None:
    array = pixels(5, SAME, SAME)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    path = save(tmp_path / "a.png", array, exif=exif)
    np.testing.assert_array_equal(read(path, GREY)[0], np.rot90(array, -1))


# --- 16 bits ----------------------------------------------------------------------------------------------------------

DEEP = {
    "png": lambda array: png16(array),
    "tiff": lambda array: tiff16(array),
    "big-endian": lambda array: tiff16(array, order=">"),
    "compressed": lambda array: tiff16(array, compressed=True),
}


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("window", [None, (0, 4095), (1000, 1255)])
def test_colour_of_sixteen_bits_has_all_of_them(tmp_path: Path, kind: str, window: tuple[int, int] | None) -> None:
    array = small(dtype=np.uint16, below=None if window is None else window[1] + 200)
    path = write(tmp_path / "deep", DEEP[kind](array))
    found = read(path, Rendering(SAME, 3, window))
    np.testing.assert_array_equal(found, scaled(array, *(window or (0, 65535))).transpose(2, 0, 1))


@pytest.mark.parametrize("window", [None, (0, 4095)])
@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_grey_of_sixteen_bits(tmp_path: Path, name: str, window: tuple[int, int] | None) -> None:
    array = small(channels=1, dtype=np.uint16, below=5000 if window else None)
    found = read(save(tmp_path / name, array), Rendering(SAME, 1, window))
    np.testing.assert_array_equal(found[0], scaled(array, *(window or (0, 65535))))


def test_negative_and_inverted_values_of_a_tiff(tmp_path: Path) -> None:
    signed = np.linspace(-1500, 1500, SAME * SAME).astype(np.int16).reshape(SAME, SAME)
    found = read(write(tmp_path / "ct.tif", tiff16(signed)), Rendering(SAME, 1, (-1000, 1000)))
    np.testing.assert_array_equal(found[0], scaled(signed, -1000, 1000))
    array = small(channels=1, dtype=np.uint16)
    inverted = read(write(tmp_path / "x.tif", tiff16(array, white_is_zero=True)), GREY)
    np.testing.assert_array_equal(inverted[0], scaled(65535 - array.astype(int), 0, 65535))


def test_transparency_of_sixteen_bits(tmp_path: Path) -> None:
    array = small(channels=4, dtype=np.uint16)
    found = read(write(tmp_path / "a.png", png16(array)), Rendering(SAME, 3, (0, 60000)))
    np.testing.assert_array_equal(found, scaled(array[..., :3], 0, 60000).transpose(2, 0, 1))
    said = refusal(write(tmp_path / "b.png", png16(array[..., :2])))
    assert said == "has 16 bits in a form that cannot be read (LA;16B): save it as PNG without transparency"


def test_arrays_are_rendered_as_files_are(tmp_path: Path) -> None:
    array, deep = pixels(1), pixels(2, dtype=np.uint16, below=4000)
    np.testing.assert_array_equal(render_array(array, COLOUR)[1], read(save(tmp_path / "a.png", array)))
    window = Rendering(SAME, 3, (0, 4095))
    np.testing.assert_array_equal(render_array(deep, window)[1], read(write(tmp_path / "b.png", png16(deep)), window))
    grey = array[..., :1]
    np.testing.assert_array_equal(render_array(grey, GREY)[1], render_array(grey[..., 0], GREY)[1])
    assert render_array(grey, GREY)[0] != render_array(array[..., 1:2], GREY)[0]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_no_image_is_refused_by_its_first_bytes(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "notes.png", b"only text")) == "is no PNG, JPEG, TIFF or DICOM file"
    assert refusal(write(tmp_path / "empty.png", b"")) == "is empty, 0 bytes"
    Image.fromarray(small()).save(tmp_path / "a.bmp")
    assert refusal(tmp_path / "a.bmp") == "is no PNG, JPEG, TIFF or DICOM file"


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif"])
def test_damaged_and_truncated_files_are_refused(tmp_path: Path, name: str) -> None:
    whole = save(tmp_path / name, pixels(0, 200, 200, 3)).read_bytes()
    for length in (len(whole) // 2, 12):
        assert "damaged" in refusal(write(tmp_path / name, whole[:length]))
    if name == "a.png":
        spoiled = bytearray(whole)
        spoiled[len(whole) // 2] ^= 0xFF
        assert "is damaged or cut off (broken" in refusal(write(tmp_path / name, bytes(spoiled)))


def test_a_picture_that_would_fill_the_memory_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    for side, words in ((10_000, "has 10000x10000 pixels, and at most 89478485 are unpacked"), (30_000, "bomb")):
        assert words in refusal(write(tmp_path / "bomb.png", png(side, side, 8, 0, b"")))


def test_a_file_that_is_too_large_is_refused_without_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_BYTES", 10)
    assert refusal(write(tmp_path / "a.png", b"x" * 11)) == "has 11 bytes, and at most 10 are read"


def test_several_pages_or_frames_are_refused_and_a_cameras_preview_is_not(tmp_path: Path) -> None:
    pictures = [Image.fromarray(pixels(seed)) for seed in (1, 2, 3)]
    pictures[0].save(tmp_path / "a.tif", save_all=True, append_images=pictures[1:])
    said = refusal(tmp_path / "a.tif")
    assert said == "has 3 pages, and which is the image is not known: save that one alone"
    pictures[0].save(tmp_path / "a.png", save_all=True, append_images=pictures[1:])
    assert "has 3 frames" in refusal(tmp_path / "a.png")
    pictures[0].save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=pictures[1:])
    read(tmp_path / "a.jpg")


def test_floating_point_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tif", pixels(1, 5, 5).astype(np.float32))
    assert "holds numbers of another kind than 8 or 16 bits" in refusal(path)


def test_a_file_that_is_not_there_may_be_there_later(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        render_file(tmp_path / "a.png", COLOUR)


# --- DICOM ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _pydicom() -> None:
    pytest.importorskip("pydicom")


with_pydicom = pytest.mark.usefixtures("_pydicom")


@with_pydicom
def test_dicom_of_eight_bits_grey_and_colour(tmp_path: Path) -> None:
    grey, colour = small(channels=1), small()
    np.testing.assert_array_equal(read(write(tmp_path / "a", dicom(grey)), GREY)[0], grey)
    np.testing.assert_array_equal(read(write(tmp_path / "b", dicom(colour))), colour.transpose(2, 0, 1))
    inverted = read(write(tmp_path / "c", dicom(grey, PhotometricInterpretation="MONOCHROME1")), GREY)
    np.testing.assert_array_equal(inverted[0], 255 - grey)


@with_pydicom
def test_dicom_takes_the_window_of_the_file_else_that_of_the_federation_else_all_bits(tmp_path: Path) -> None:
    array = small(channels=1, dtype=np.uint16, below=4096)
    plain = write(tmp_path / "plain", dicom(array, BitsStored=12, HighBit=11))
    np.testing.assert_array_equal(read(plain, GREY)[0], scaled(array, 0, 4095))
    np.testing.assert_array_equal(read(plain, Rendering(SAME, 1, (100, 900)))[0], scaled(array, 100, 900))
    window = {"WindowCenter": [1000, 5], "WindowWidth": [401, 5]}
    for curve, low, high in (("LINEAR", 799.5, 1199.5), ("LINEAR_EXACT", 799.5, 1200.5)):
        path = write(tmp_path / curve, dicom(array, VOILUTFunction=curve, **window))
        np.testing.assert_array_equal(read(path, Rendering(SAME, 1, (0, 9)))[0], scaled(array, low, high))
    sigmoid = read(write(tmp_path / "s", dicom(array, VOILUTFunction="SIGMOID", **window)), GREY)
    expected = 255 / (1 + np.exp(-4 * (array.astype(np.float64) - 1000) / 401))
    assert abs(sigmoid[0] - expected).max() <= 0.51


@with_pydicom
def test_dicom_of_a_tomograph_is_in_its_units(tmp_path: Path) -> None:
    stored = np.linspace(0, 3000, SAME * SAME).astype(np.int16).reshape(SAME, SAME)
    rescaled = {"RescaleSlope": 2, "RescaleIntercept": -1024}
    path = write(tmp_path / "ct", dicom(stored, WindowCenter=40, WindowWidth=400, **rescaled))
    units = stored.astype(int) * 2 - 1024
    np.testing.assert_array_equal(read(path, GREY)[0], scaled(units, 39.5 - 199.5, 39.5 + 199.5))
    plain = write(tmp_path / "plain", dicom(stored, **rescaled))
    np.testing.assert_array_equal(read(plain, GREY)[0], scaled(units, -32768 * 2 - 1024, 32767 * 2 - 1024))


@with_pydicom
def test_a_table_in_a_dicom_file_is_its_window(tmp_path: Path) -> None:
    from pydicom.dataset import Dataset

    table = Dataset()
    table.LUTDescriptor = [256, 0, 16]
    table.LUTData = (256 * (255 - np.arange(256))).astype("<u2").tobytes()
    array = small(channels=1)
    path = write(tmp_path / "a", dicom(array, VOILUTSequence=[table]))
    np.testing.assert_array_equal(read(path, GREY)[0], scaled(256 * (255 - array.astype(int)), 0, 65535))


@with_pydicom
def test_dicom_that_cannot_be_used_is_refused_with_a_reason(tmp_path: Path) -> None:
    array = small(channels=1)
    whole = dicom(array)
    assert "has 5 frames" in refusal(write(tmp_path / "a", dicom(array, NumberOfFrames=5)))
    assert "colours of the kind HSV" in refusal(write(tmp_path / "b", dicom(array, PhotometricInterpretation="HSV")))
    assert "has 32 bits a sample" in refusal(write(tmp_path / "c", dicom(array, BitsAllocated=32)))
    assert "damaged" in refusal(write(tmp_path / "d", whole[:-30]))
    assert "has 60000x60000 pixels" in refusal(write(tmp_path / "e", dicom(array, Rows=60_000, Columns=60_000)))
    assert "window of width 0" in refusal(write(tmp_path / "f", dicom(array, WindowCenter=1, WindowWidth=0)))


def test_dicom_without_pydicom_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)  # importing it is an ImportError
    said = refusal(write(tmp_path / "a", bytes(128) + b"DICM" + bytes(100)))
    assert said == 'is a DICOM file, and pydicom, which reads them, is not installed: pip install "crad-p2p[dicom]"'


def test_reading_images_needs_no_torch() -> None:
    code = "import sys, crad_p2p.data.own.site; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
