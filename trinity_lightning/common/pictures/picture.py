"""Pictures of tasks: read from what an entry has, known by their content, and the same for engine and trainer.

Pillow and the pixels are loaded when a picture is looked at first, so that runs on text pay nothing for them, and a
dataset with many pictures is never in memory as a whole.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import unquote

from xxhash import xxh3_128_hexdigest

from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

_CHECKED: set[int] = set()  # versions of files that `Picture.check` has found to be usable, in this process
FIELD = ".images_field"  # key of the field with pictures, within a taskset's section
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)  # a colon alone may be part of a file's name
_FILE_URL, _THIS_MACHINE = "file://", ("", "localhost")
_DATA_URL = re.compile(r"data:[^,]*?(;base64)?,", re.IGNORECASE)
_ENCODE = "write it as data:image/png;base64,..."
_FILMS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
_LONGEST_PATH = 4096
_LEAST_EDGE = 2  # in pixels: a single one shows nothing, and is what trackers and failed downloads leave behind
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}  # the last bytes of files, within their tail
_WHOLE_IF_OPENED = "WEBP"  # a format whose files Pillow opens only if they are whole
_TAIL = 16
_THUMBNAIL_EDGE = 128  # in pixels, at most
_ORIENTATION, _ON_THEIR_SIDE = 0x0112, (5, 6, 7, 8)  # an EXIF tag, and its values for pictures to turn by 90 degrees
_WITH_PREVIEWS = ("MPO",)  # formats whose further pictures show the same, in another size


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture; two are equal if their sizes and all of their pixels are, in RGB.

    It goes to other processes with the bytes of its file, because another machine may not have the file. They are read
    once, however often it goes; if the file is lost, it goes with the pixels that were read from it.

    Attributes:
        source: a picture of Pillow's, or a picture's file as bytes, as base64 text or by its path.
    """

    source: Image.Image | bytes | str | Path

    @cached_property
    def image(self) -> Image.Image:
        """The picture upright, in Pillow's mode RGB.

        Raises:
            ConfigError: the file is missing or damaged, or its pixels are no colours; or as in `check`.
        """
        from PIL import ImageOps

        with self._opened() as image:
            self._check_head(image)
            image.load()
            return _in_rgb(ImageOps.exif_transpose(image), self.name)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture in pixels, read from the head of its file; errors as in `image`."""
        with self._opened() as image:
            width, height = image.size
            return (height, width) if image.getexif().get(_ORIENTATION) in _ON_THEIR_SIDE else (width, height)

    @cached_property
    def digest(self) -> str:
        """Hash of size and pixels, 32 hex digits."""
        return xxh3_128_hexdigest(repr(self.image.size).encode() + self.image.tobytes())

    @cached_property
    def thumbnail(self) -> bytes:
        """A small copy as a JPEG file, for people to look at."""
        width, height = self.image.size
        shrunk = max(width, height, _THUMBNAIL_EDGE) / _THUMBNAIL_EDGE
        size = (max(round(width / shrunk), 1), max(round(height / shrunk), 1))
        self.image.resize(size, reducing_gap=2.0).save(file := BytesIO(), "JPEG", quality=85)
        return file.getvalue()

    @property
    def fingerprint(self) -> str:
        """Hash of the file's bytes, or of the pixels of a picture without a file, 32 hex digits.

        Raises:
            ConfigError: the file is missing.
        """
        content = self._content()
        return self.digest if content is None else xxh3_128_hexdigest(content)

    @property
    def outline(self) -> str:
        """Same as `fingerprint`, but of a file no more than its size in bytes, which is known without reading it.

        Raises:
            ConfigError: the file is missing.
        """
        if not isinstance(self.source, Path):
            return self.fingerprint
        with _named_errors(self.name):
            return str(self.source.stat().st_size)

    @cached_property
    def data_url(self) -> str:
        """The picture as a PNG file within a URL, as endpoints of OpenAI's API take it."""
        file = BytesIO()
        self.image.save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    @property
    def name(self) -> str:
        """The picture's name in messages."""
        return f"picture '{self.source!s:.200}'" if isinstance(self.source, Path) else "a picture"

    def check(self) -> None:
        """Refuse a picture that cannot be used: before a run, as this reads from the disk.

        Of a JPEG or WebP file head and end are read, of a PNG file all bytes, which have checksums; other formats are
        decoded. A file that has passed is not opened again, as long as its size and its time of change stay.

        Raises:
            ConfigError: the file is missing, is cut off, is no picture or several, has too many pixels or too few, or
                is a PNG file with a wrong checksum.
        """
        if (version := self._version()) in _CHECKED:
            return
        with self._opened() as image:
            self._check_head(image)
            if not self._is_whole(image.format):
                image.load()  # which raises an error unless other bytes follow the picture's own
            elif image.format == "PNG" and image is not self.source:
                image.verify()
        if version is not None:
            _CHECKED.add(version)

    def _version(self) -> int | None:
        """Hash by which the file as it is now is known without opening it; None without a file."""
        if isinstance(self.source, Path):
            with _named_errors(self.name):
                state = self.source.stat()
            return hash((self.source, state.st_size, state.st_mtime_ns))
        return hash(self.source) if isinstance(self.source, bytes | str) else None

    def _check_head(self, image: Image.Image) -> None:
        """Refuse several pictures, too many pixels or too few; a ConfigError."""
        from PIL.Image import MAX_IMAGE_PIXELS

        width, height = image.size
        if MAX_IMAGE_PIXELS is not None and width * height > MAX_IMAGE_PIXELS:
            raise _too_large(self.name, f"{width} x {height} pixels, above {MAX_IMAGE_PIXELS}")
        if min(width, height) < _LEAST_EDGE:
            raise ConfigError(
                f"{self.name} has {width} x {height} pixels, which show nothing", fix="leave such entries out"
            )
        if getattr(image, "is_animated", False) and image.format not in _WITH_PREVIEWS:
            count = getattr(image, "n_frames", "several")
            raise ConfigError(f"{self.name} is {count} pictures, as a film is", fix="save the one that is meant")

    def _is_whole(self, kind: str | None) -> bool:
        """True if the file is known to be whole, because it ends as files of its format do, or there is no file."""
        if kind == _WHOLE_IF_OPENED or is_image(self.source):
            return True
        if (end := _ENDS.get(kind or "")) is None:
            return False
        if not isinstance(self.source, Path):
            return end in (self._content() or b"")[-_TAIL:]
        with self.source.open("rb") as file:
            file.seek(-min(_TAIL, self.source.stat().st_size), 2)
            return end in file.read()

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        """The picture, whose pixels are still in the file; errors that are raised meanwhile name it."""
        from PIL import Image

        with _named_errors(self.name):
            if isinstance(self.source, Image.Image):
                yield self.source
                return
            content = None if isinstance(self.source, Path) else self._content()
            with Image.open(self.source if content is None else BytesIO(content)) as image:
                yield image

    def _content(self) -> bytes | None:
        """The bytes of the file; None without a file."""
        if isinstance(self.source, Path):
            with _named_errors(self.name):
                return self.source.read_bytes()
        if not isinstance(self.source, str):
            return self.source if isinstance(self.source, bytes) else None
        try:
            return base64.b64decode("".join(self.source.split()), validate=True)  # it may be broken into lines
        except ValueError as error:
            raise ConfigError(f"the data URL of {self.source:.40}... is no base64 ({error})", fix=_ENCODE) from error

    @cached_property
    def _sent(self) -> Image.Image | bytes:
        """The bytes of the file; or the picture's pixels, without a file or if it is lost since they were read."""
        try:
            content = self._content()
        except ConfigError:
            if "image" not in vars(self):
                raise
            content = None
        return self.image if content is None else content

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self._sent}

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Picture):
            return self is other
        same_file = isinstance(self.source, bytes | str | Path) and self.source == other.source
        return same_file or self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Turn the errors of Pillow and of the file system into a ConfigError that names the picture."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError as error:
        fix = "correct its path, which is relative to the data file's folder"
        raise ConfigError(f"{name}: there is no such file", fix=fix) from error
    except Image.DecompressionBombError as error:
        raise _too_large(name, str(error).partition(",")[0]) from error
    except UnidentifiedImageError as error:
        raise ConfigError(f"{name} is no picture, or damaged, or of an unknown format", fix="save it as PNG") from error
    # Pillow's readers raise any of these.
    except (OSError, SyntaxError, ValueError, EOFError, LookupError, RuntimeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error  # which does not have the path again
        raise ConfigError(f"{name} cannot be read ({reason})", fix="replace it, or leave such entries out") from error


def _too_large(name: str, size: str) -> ConfigError:
    return ConfigError(f"{name} is too large ({size})", fix="make it smaller, as the model's processor would do")


def _in_rgb(image: Image.Image, name: str) -> Image.Image:
    """The picture in RGB.

    Transparent pixels show white behind them, because drawings without a ground are made for white pages, and vLLM does
    the same. Greys of 16 bits keep their upper 8 bits, which Pillow would cut off at 255.
    """
    from PIL import Image

    if image.mode.startswith("I"):
        image = image.convert("I")
        _, largest = image.getextrema()
        if isinstance(largest, tuple) or largest >= 2**16:
            raise ConfigError(f"{name} has pixels of 32 bits", fix="save it with 8 bits a colour")
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    if image.mode == "F":
        raise ConfigError(f"{name} has fractions as pixels", fix="save it with 8 bits a colour")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


# -- what an entry has -------------------------------------------------------------------------------------------------


def read_pictures(value: object, folder: Path) -> list[Picture]:
    """The pictures of a field with one, with a list of them, or with JSON text of a list; see `read_picture`."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list | tuple):
        return [read_picture(element, folder) for element in value]
    return [read_picture(value, folder)]


def read_picture(value: object, folder: Path) -> Picture:
    """The picture that a value of an entry stands for. Its file is not opened yet: see `Picture.check`.

    Args:
        value: a picture of Pillow's, a path or a file:// URL, a data URL, the bytes of a file, or a mapping with
            `bytes` or `path`, as `datasets` has it.
        folder: folder of the data, in which relative paths begin.

    Raises:
        ConfigError: the value is none of these, or an address on the web.
    """
    if isinstance(value, Picture):
        return value
    if isinstance(value, Mapping):
        names = [name for name in ("bytes", "path", "url") if value.get(name) is not None]
        if names:
            return read_picture(value[names[0]], folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture(bytes(value))
    if isinstance(value, str | Path) and str(value):
        return _of_text(str(value), folder)
    if is_image(value):
        return Picture(cast("Any", value))
    raise ConfigError(
        f"a {type(value).__name__} ({value!r:.60}) is no picture",
        key=FIELD,
        fix="give a path, bytes, a picture of PIL, or {bytes, path}; images_field names the field with pictures",
    )


def is_image(value: object) -> bool:
    """True if the value is a picture of Pillow's."""
    pillow = sys.modules.get("PIL.Image")  # it is loaded if there is any picture
    return pillow is not None and isinstance(value, pillow.Image)


def _of_text(text: str, folder: Path) -> Picture:
    """The picture of a path, a file:// URL or a data URL."""
    if data := _DATA_URL.match(text):
        if data[1] is None:
            raise ConfigError(f"the data URL {text:.40}... is not in base64", fix=_ENCODE)
        return Picture(text[data.end() :])
    if text[: len(_FILE_URL)].lower() == _FILE_URL:
        machine, slash, path = unquote(text[len(_FILE_URL) :]).partition("/")
        if machine.lower() not in _THIS_MACHINE or not slash:
            raise ConfigError(
                f"picture '{text:.80}' is on another machine ({machine:.40}), as its URL says",
                fix=f"write {_FILE_URL}/ and the whole path, or the path alone if it begins in the data's folder",
            )
        text = slash + path
    elif address := _ADDRESS.match(text):
        raise ConfigError(
            f"picture '{text:.80}' is on the web ({address[1]}), and a run downloads nothing",
            fix="download it before, and give its path",
        )
    if text.lower().endswith(_FILMS):
        raise ConfigError(
            f"'{text}' is a film, and only pictures and text are trained on", fix="leave such entries out"
        )
    if len(text) > _LONGEST_PATH:
        raise ConfigError(f"a text of {len(text)} characters ({text:.40}...) is no path of a picture", fix=_ENCODE)
    try:
        return Picture(folder / Path(text).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"picture '{text:.80}' has no such user's folder", fix="give its whole path") from error
