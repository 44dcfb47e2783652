"""Pictures as entries have them: read alike from every form, in RGB, and refused by name."""

import base64
import copy
import pickle
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.errors import refuses

from trinity_lightning.common.pictures.picture import FIELD, Picture, read_picture, read_pictures
from trinity_lightning.errors import ConfigError

SIZE = (4, 3)


def drawn(size: tuple[int, int] = SIZE, mode: str = "RGB") -> Image.Image:
    """Random pixels, the same each time."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(pixels if channels > 1 else pixels[..., 0]).convert(mode)


def encoded(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(picture: Picture) -> np.ndarray:
    assert picture.image.mode == "RGB"
    return np.asarray(picture.image)


# Forms


def test_every_form_of_a_picture_is_the_same_one(tmp_path: Path) -> None:
    content = encoded(drawn())
    (tmp_path / "a.png").write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    lines = "data:image/png;name=a;BASE64,\r\n" + base64.encodebytes(content).decode()
    names = ("scan.12:30:05.png", "img:1.png", "data:1.png", "with space.png", "x.png")
    for name in names:
        (tmp_path / name).write_bytes(content)
    forms: list[Any] = [
        drawn(), Image.open(BytesIO(content)), "a.png", "./a.png", tmp_path / "a.png", str(tmp_path / "a.png"), content,
        bytearray(content), {"bytes": content, "path": None}, {"bytes": content, "path": "elsewhere.png"},
        {"bytes": None, "path": "a.png"}, {"url": url}, url, Picture(drawn()), lines, *names,
        f"file://{tmp_path}/a.png", f"FILE://{tmp_path}/with space.png", (tmp_path / "with space.png").as_uri(),
        f"file://localhost{tmp_path}/a.png",
    ]  # fmt: skip
    pictures = [read_picture(form, tmp_path) for form in forms]
    assert {picture.digest for picture in pictures} == {Picture(drawn()).digest}
    assert len(set(pictures)) == 1
    for picture in pictures:
        assert np.array_equal(pixels(picture), np.asarray(drawn()))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_field_has_one_picture_or_a_list(as_json: bool, tmp_path: Path) -> None:
    (tmp_path / "[a].png").write_bytes(encoded(drawn()))
    drawn().save(tmp_path / "b.png")
    many: Any = '["[a].png", "b.png"]' if as_json else ["[a].png", "b.png"]
    assert [picture.source for picture in read_pictures(many, tmp_path)] == [tmp_path / "[a].png", tmp_path / "b.png"]
    assert len(read_pictures("[a].png", tmp_path)) == len(read_pictures({"path": "b.png"}, tmp_path)) == 1


def test_pictures_differ_by_a_pixel_or_by_their_shape() -> None:
    other = drawn()
    other.putpixel((0, 0), (1, 2, 3))
    wide, tall = (Picture(Image.new("RGB", size)) for size in ((6, 2), (2, 6)))
    assert Picture(drawn()) != Picture(other)
    assert wide != tall
    assert wide != "a picture"


@pytest.mark.slow
def test_reading_needs_neither_torch_nor_the_pixels(tmp_path: Path) -> None:
    drawn((50, 50)).save(tmp_path / "a.png")
    code = (
        "import sys; from pathlib import Path; import trinity_lightning.common.messages as m;"
        "assert 'PIL' not in sys.modules;"
        "p = m.read_picture(sys.argv[1], Path());"
        "assert 'torch' not in sys.modules and 'image' not in vars(p)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True)


# In RGB


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "RGB"])
def test_colours_without_transparency_are_converted_as_pillow_does(mode: str) -> None:
    assert np.array_equal(pixels(Picture(drawn(mode=mode))), np.asarray(drawn(mode=mode).convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", SIZE, (200, 0, 0, 0))
    image.putpixel((1, 1), (200, 200, 200, 255))
    image.putpixel((2, 1), (0, 0, 0, 51))
    read = pixels(Picture(image.convert("LA").convert(mode)))
    assert read[0, 0].tolist() == [255] * 3
    assert read[1, 1].tolist() == [200] * 3
    assert read[1, 2].tolist() == [204] * 3  # a fifth of black


def test_a_transparent_colour_of_a_palette_is_white() -> None:
    palette = Image.new("P", SIZE)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((0, 0), 1)
    read = pixels(Picture(encoded(palette, transparency=0)))
    assert read[0, 0].tolist() == [40, 50, 60]
    assert read[0, 1].tolist() == [255] * 3


def test_greys_of_16_bits_keep_their_upper_bits() -> None:
    greys = np.array([[0, 255, 256], [4096, 40000, 65535]], np.uint16)
    image = Image.fromarray(greys)
    for form in (image, encoded(image), image.convert("I")):
        assert pixels(Picture(form))[..., 0].tolist() == [[0, 0, 1], [16, 156, 255]]


def test_a_photograph_is_upright() -> None:
    image = drawn((16, 8))
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    turned = Picture(encoded(image, exif=exif))
    assert turned.image.size == (8, 16)
    assert np.array_equal(pixels(turned), np.rot90(np.asarray(image), -1))


# In other processes, and in a resumed run


def test_a_picture_travels_with_its_file(tmp_path: Path) -> None:
    for kind in ("png", "jpeg"):
        (tmp_path / "a").write_bytes(encoded(drawn(), kind))
        picture = read_picture("a", tmp_path)
        sent = pickle.dumps(picture)
        (tmp_path / "a").unlink()
        received = pickle.loads(sent)  # noqa: S301 - as Ray does
        assert received.source == encoded(drawn(), kind)
        (tmp_path / "a").write_bytes(received.source)
        assert received == picture
    assert pickle.loads(pickle.dumps(Picture(drawn(mode="RGBA")))) == Picture(drawn(mode="RGBA"))  # noqa: S301


def test_a_picture_that_was_read_travels_without_its_file(tmp_path: Path) -> None:
    """A task is sent to reward functions for each of its responses."""
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for path in paths:
        drawn().save(path)
    sent_before, read_before, unread = (read_picture(path, tmp_path) for path in paths)
    first, _ = pickle.dumps(sent_before), read_before.image
    for path in paths:
        path.unlink()
    assert pickle.dumps(sent_before) == first
    assert pickle.loads(pickle.dumps(read_before)) == Picture(drawn())  # noqa: S301 - as Ray does
    with pytest.raises(ConfigError, match=r"c\.png.*no such file"):
        pickle.dumps(unread)


def test_a_copy_is_the_picture_itself() -> None:
    picture = Picture(drawn())
    assert copy.deepcopy([picture])[0] is picture


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    for name, color in (("a", "red"), ("b", "red"), ("c", "blue")):
        Image.new("RGB", SIZE, color).save(tmp_path / f"{name}.png")
    a, b, c = (read_picture(f"{name}.png", tmp_path).fingerprint for name in "abc")
    assert a == b != c
    assert Picture(Image.new("RGB", SIZE, "red")).fingerprint != Picture(Image.new("RGB", SIZE, "blue")).fingerprint


# Refused


def bomb(width: int, height: int) -> bytes:
    """A PNG of some bytes whose head promises many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return b"\x89PNG\r\n\x1a\n" + chunk + encoded(drawn())[33:]


FILES: dict[str, tuple[bytes, str]] = {
    "empty.png": (b"", "no picture"),
    "broken.png": (encoded(drawn())[:20], "broken.png"),
    "text.png": (b"not a picture", "no picture"),
    "one.png": (encoded(drawn((1, 1))), "1 x 1 pixels"),
    "line.png": (encoded(drawn((9, 1))), "9 x 1 pixels"),
    "large.png": (bomb(20_000, 20_000), "too large"),
    "largish.png": (bomb(10_000, 9_000), "10000 x 9000 pixels"),
    "film.gif": (encoded(drawn(), "gif", save_all=True, append_images=[drawn().rotate(180)]), "2 pictures"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_before_its_pixels_are_read(name: str, tmp_path: Path) -> None:
    content, named = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=named) as refused:
        read_picture(name, tmp_path).check()
    assert name in str(refused.value)
    assert refused.value.fix
    for read in (Picture.check, lambda picture: picture.image):
        with pytest.raises(ConfigError, match=named.replace(name, "picture")):
            read(read_picture(content, tmp_path))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("missing.png", "no such file"),
        (".", "cannot be read"),
        ("https://example.org/a.png", "downloads nothing"),
        ("s3://bucket/a.png", "downloads nothing"),
        ("x://y/a.png", "downloads nothing"),
        ("file:///missing.png", "no such file"),
        ("file:///film.mp4", "film"),
        ("file://host/a.png", "another machine (host)"),
        ("file://a.png", "another machine (a.png)"),
        ("~nouser/a.png", "'~nouser/a.png' has no such user's folder"),
        ("data:image/svg+xml,<svg/>", "base64"),
        ({"url": "http://example.org/a.png"}, "downloads nothing"),
        ("film.MP4", "film"),
        ("data:image/png;base64,!!!", "base64"),
        ("A" * 2000, "cannot be read"),
        ("A" * 5000, "base64,"),
    ],
)
def test_a_text_that_leads_to_no_picture_is_refused(value: Any, named: str, tmp_path: Path) -> None:
    with refuses(None) as refused:
        read_picture(value, tmp_path).check()
    assert named in str(refused.value)
    assert refused.value.fix
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("value", [3, {}, {"path": None}, "", [], None, np.zeros((2, 2, 3))])
def test_a_value_of_another_kind_is_refused(value: Any) -> None:
    with refuses(FIELD):
        read_picture(value, Path())


ENDS_EARLY = {"webp": "cannot be read", "ppm": "truncated|cannot be read"}


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "bmp", "gif", "tiff", "ppm", "mpo"])
def test_a_file_that_ends_early_is_refused_before_a_run(kind: str, tmp_path: Path) -> None:
    content = encoded(drawn((60, 60)), kind)
    read_picture(content, tmp_path).check()
    (tmp_path / "cut.png").write_bytes(content[: 3 * len(content) // 4])
    with pytest.raises(ConfigError, match=r"cut\.png"):
        read_picture("cut.png", tmp_path).check()
    with pytest.raises(ConfigError, match=ENDS_EARLY.get(kind, "truncated")):
        read_picture(content[: 3 * len(content) // 4], tmp_path).check()
    more = read_picture(content + b"further bytes, as some cameras add" * 9, tmp_path)
    more.check()
    assert more == Picture(content)


def test_a_damaged_file_is_refused_when_it_is_looked_at(tmp_path: Path) -> None:
    content = bytearray(encoded(drawn((60, 60))))
    content[len(content) // 2] ^= 255
    (tmp_path / "damaged.png").write_bytes(content)
    for read in (Picture.check, lambda picture: picture.image):  # before a run, and in rollouts
        with pytest.raises(ConfigError, match=r"damaged\.png"):
            read(read_picture("damaged.png", tmp_path))
        with pytest.raises(ConfigError, match="a picture cannot be read"):
            read(read_picture(bytes(content), tmp_path))


def test_a_picture_that_pillow_has_opened_is_checked_and_still_there(tmp_path: Path) -> None:
    drawn((60, 60)).save(tmp_path / "a.png")
    opened = Picture(Image.open(tmp_path / "a.png"))
    opened.check()
    assert opened == Picture(drawn((60, 60)))


def test_a_data_url_is_the_picture() -> None:
    picture = Picture(drawn((9, 7)))
    assert read_picture(picture.data_url, Path()) == picture
    assert picture.data_url is picture.data_url  # written once, however many verdicts a judge gives


def test_a_file_is_checked_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_all() -> None:
        for form in (
            "a.png",
            encoded(drawn((7, 5))),
            f"data:;base64,{base64.b64encode(encoded(drawn((5, 7)))).decode()}",
        ):
            read_picture(form, tmp_path).check()

    opened: list[Any] = []
    monkeypatch.setattr(Image, "open", lambda file, open=Image.open: opened.append(file) or open(file))
    drawn().save(tmp_path / "a.png")
    check_all()
    check_all()
    assert len(opened) == 3
    (tmp_path / "a.png").write_bytes(encoded(drawn())[:20])
    with pytest.raises(ConfigError, match=r"a\.png"):
        check_all()


@pytest.mark.parametrize("kind", ["F", "I"])
def test_pixels_that_are_no_colours_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="8 bits"):
        Picture(Image.fromarray(np.full((3, 3), 1e6, np.float32 if kind == "F" else np.int32))).image  # noqa: B018


def test_a_phones_picture_with_previews_is_one() -> None:
    content = encoded(drawn(), "mpo", save_all=True, append_images=[drawn()])
    assert read_picture(content, Path()).image.size == SIZE
