"""
sandbox_looks.py: where a picture's pixels come from: found, remembered, or edited.

Concept     A look may be a slice, a buffer, a file, a resize. Exact pixels are searched for in the
            input; resizes are remembered where they are made; an edit must follow the crop.
Paper       nothing: CodeV judges what a tool showed; which pixels those are is left to the sandbox
In          pictures and what was done to them
Out         steps that lead from the input to a picture; whether a picture is a crop, edited
Left out    rotations by other than quarter turns, warps; trust: the trainer repeats every step
Read next   sandbox.verified (who repeats the steps), sandbox_stand_ins.py (who remembers them)
"""

from collections import namedtuple

import numpy as np
from PIL import Image, ImageFilter

from kit.boxes import intersection, outwards

MOST_STEPS = 24  # ours: steps that the trainer repeats to verify one image; crops in a row are one
MOST_WORK = 1 << 26  # ours: pixels that it is willing to make for that
MOST_SIDE = 1 << 14  # ours: pixels, a side of what it makes
UPRIGHT = "1+0j 0+1j"  # the way of a crop that is neither turned nor flipped: its right, its down
COARSEST = 2.1  # ours: half the resolution (JPEG halves that of colour), and room for odd sizes

LONGEST = 512  # ours: pixels, the longer side at which an edit is looked at, which bounds its cost
WINDOW = 16  # ours: pixels, the side of windows that overlap, in which an edit must follow the crop
# Ours, from 90 honest edits and 20 drawings on crops of nine images. Most honest ones reach .99,
# strong sharpening .93; ramps and vignettes have at most .91. Honest ones leave at most 18 of 255
# unexplained, and 9 where the crop is plain; drawings more, down to text that is 40 levels brighter
# than its ground. They lose at most .41 of the detail, mosaics of four pixels and more .6 to .99.
LEAST_CORRELATION, MOST_STRANGE, MOST_LOST = 0.9, 20, 0.5


def lay(pixels: np.ndarray, way: int) -> np.ndarray:
    """One of the eight ways to lay a picture down: mirrored at its diagonal from 4 on, and turned
    counterclockwise by as many quarters as way has more than 0 or 4."""
    turned = pixels.swapaxes(0, 1) if way > 3 else pixels
    return np.rot90(turned, way % 4) if way % 4 else turned


# Of each way, a, b, d, e of `placed` for what undoes it.
UNDO = [(1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)]
UNDO += [(0, 1, 1, 0), (1, 0, 0, -1), (0, -1, -1, 0), (-1, 0, 0, 1)]


def turn_back(way: int, w: int, h: int) -> list[list]:
    """The step that undoes `lay` and leads to w, h, if there is anything to undo."""
    a, b, d, e = UNDO[way]
    c, f = -min(a * w + b * h, 0), -min(d * w + e * h, 0)
    return [["affine", w, h, a, b, c, d, e, f, 0]] * (way > 0)


def find(part: np.ndarray, whole: np.ndarray) -> list[list] | None:
    """The steps to where `part` stands in `whole`, perhaps turned or with red and blue swapped.

    Both [h, w, 3], uint8. Green is the same in RGB and BGR: the places of part's rarest green are
    candidates, and fifteen more pixels leave few. A picture of one colour is found nowhere."""
    counts = np.bincount(part[..., 1].ravel(), minlength=256)
    rarest = int(np.where(counts, counts, part.size).argmin())
    candidates = whole[..., 1] == rarest
    if (part == part[0, 0]).all() or np.count_nonzero(candidates) > 1 << 20:
        return None
    ys, xs = np.nonzero(candidates)
    tries = 16  # ours: full comparisons, which bounds the cost
    for way in range(8):
        turned = lay(part, way)
        h, w = turned.shape[:2]
        first, column = divmod(int((turned[..., 1] == rarest).argmax()), w)
        inside = (ys >= first) & (ys - first <= whole.shape[0] - h)
        inside &= (xs >= column) & (xs - column <= whole.shape[1] - w)
        y, x = ys[inside] - first, xs[inside] - column
        for k in range(15):
            dy, dx = (k * 7 + 3) % 16 * h // 16, (k * 11 + 5) % 16 * w // 16
            same = whole[y + dy, x + dx, 1] == turned[dy, dx, 1]
            y, x = y[same], x[same]
        for y0, x0 in zip(y[:tries].tolist(), x[:tries].tolist()):
            if same_pixels(whole[y0 : y0 + h, x0 : x0 + w], turned):
                return [["crop", x0, y0, x0 + w, y0 + h], *turn_back(way, *size_of(part))]
        tries -= len(y[:tries])
    return None


def same_pixels(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in RGB, or if one of them is in BGR."""
    return np.array_equal(a, b) or np.array_equal(a, b[..., ::-1])


Crop = namedtuple("Crop", ("image", "box", "way"))


def repeated(original: Image.Image, steps: object) -> Crop | None:
    """What these steps lead to. None if they are none, or too much work, or lose too much.

    crop    x0, y0, x1, y1                                whole pixels of the image before it
    pil     w, h, filter, x0, y0, x1, y1, gap             Image.resize of that region
    cv2     w, h, fx, fy, interpolation                   cv2.resize, with w = h = 0 for factors
    affine  w, h, a, b, c, d, e, f, filter                Image.transform, see `placed`
    warp    w, h, a, b, c, d, e, f, flags, border         cv2.warpAffine with an inverse matrix

    Detail: a chain has no box if somewhere on the way a pixel stands for more than COARSEST times
    as many pixels of the original, in a row or column, as one of those shown, or as one of its own.
    """
    try:
        return _repeated(original, steps)
    except (TypeError, ValueError, LookupError, ArithmeticError, ImportError):
        return None  # not even steps


def _repeated(original: Image.Image, steps: list[list]) -> Crop:
    if not isinstance(steps, list) or len(steps) > MOST_STEPS:
        raise ValueError(f"expected at most {MOST_STEPS} steps")
    image, work, coarse, coarsest = original, 0, (1.0, 1.0), (1.0, 1.0)
    corner, right, down = 0j, 1 + 0j, 1j  # in the original: of the image, and its steps by a pixel
    box, near = (0, 0, *original.size), 1e-6  # 127.9999999 is 128: floats are not exact
    for name, *values in steps:
        w, h = image.size
        odd = (v for v in values if type(v) not in (int, float) or not abs(v) <= MOST_SIDE)
        if name not in ("crop", "pil", "cv2", "affine", "warp") or any(v is not None for v in odd):
            raise ValueError("an odd step")
        (to_w, to_h), (a, b, c, d, e, f) = placed(name, values, w, h)
        x0, x1 = sorted((c, c + a * to_w + b * to_h))
        y0, y1 = sorted((f, f + d * to_w + e * to_h))
        edge = name in ("affine", "warp")  # ours: how many pixels off the image these may show
        if not (-edge <= x0 < x1 <= w + edge and -edge <= y0 < y1 <= h + edge):
            raise ValueError("a step that leaves the image")
        work += to_w * max(to_h, h) * (name != "crop")
        if work > MOST_WORK or not 1 <= min(to_w, to_h) <= max(to_w, to_h) <= MOST_SIDE:
            raise ValueError("too much work")
        image = taken(image, name, values)
        corner += c * right + f * down
        right, down = a * right + d * down, b * right + e * down
        end = corner + to_w * right + to_h * down
        (x0, x1), (y0, y1) = sorted((corner.real, end.real)), sorted((corner.imag, end.imag))
        box = intersection(box, (x0, y0, x1, y1))
        near = max(near, 0.49 * edge)  # a pixel of which a warp shows less than half does not count
        coarse = abs((right + down).real), abs((right + down).imag)
        coarsest = max(coarsest[0], coarse[0]), max(coarsest[1], coarse[1])
    if any(worst > COARSEST * max(1, last) for worst, last in zip(coarsest, coarse)):
        raise ValueError("detail was thrown away")
    box = outwards(box[0] + near, box[1] + near, box[2] - near, box[3] - near)
    return Crop(image, box, f"{right / abs(right) + 0:.0f} {down / abs(down) + 0:.0f}")


def placed(name: str, values: list, w: int, h: int) -> tuple[tuple, tuple]:
    """The size to which a step leads from w, h, and a, b, c, d, e, f: x, y comes from ax + by + c,
    dx + ey + f. Raises ValueError if it turns by other than quarters."""
    if name == "crop":
        x0, y0, x1, y1 = values
        return (x1 - x0, y1 - y0), (1, 0, x0, 0, 1, y0)
    to_w, to_h, *how = values
    if name in ("affine", "warp"):
        a, b, c, d, e, f = how[:6]
        if name == "warp":  # OpenCV counts from the middles of pixels
            c, f = c + (1 - a - b) / 2, f + (1 - d - e) / 2
        if max(abs(a), abs(e)) > 1e-9 < max(abs(b), abs(d)):
            raise ValueError("a warp")
        return (to_w, to_h), tuple(round(v, 9) for v in (a, b, c, d, e, f))
    if name == "cv2" and not to_w:
        to_w, to_h = round(how[0] * w), round(how[1] * h)
    x0, y0, x1, y1 = how[1:5] if name == "pil" else (0, 0, w, h)
    return (to_w, to_h), ((x1 - x0) / to_w, 0, x0, 0, (y1 - y0) / to_h, y0)


def taken(image: Image.Image, name: str, values: list) -> Image.Image:
    """What a step makes of an image."""
    if name == "crop":
        return image.crop(values)
    size, how = tuple(values[:2]), values[2:]
    if name == "pil":
        return image.resize(size, how[0], how[1:5], how[5])
    if name == "affine":
        return image.transform(size, Image.AFFINE, how[:6], how[6])
    import cv2  # not everywhere; then these crops have no box

    call, first = cv2.resize, []
    if name == "warp":
        call, first, how = cv2.warpAffine, [np.reshape(how[:6], (2, 3))], how[6:]
    try:
        made = call(np.asarray(image), *first, size if size[0] else None, None, *how)
    except cv2.error as problem:
        raise ValueError("not as OpenCV takes it") from problem
    return Image.fromarray(made)


class Origins:
    """How each picture that the code makes came from the input. A claim: the trainer checks it."""

    def __init__(self, image: Image.Image):
        self.image, self.whole = image, None  # the array is made when it is needed
        self.known = {(image.size, some_pixels(image).tobytes()): []}  # -> steps, newest last
        self.begin()

    def begin(self) -> None:
        """A call begins. What is remembered in it, and searched for, is bounded."""
        self.memories, self.searches = 2000, 20

    def made(self, result: object, source: object, step: list | None) -> None:
        """Remember that this step led from `source` to `result`; crops in a row are one."""
        self.memories -= 1
        if not step or self.memories < 0 or (steps := self.of(source)) is None:
            return
        if step[0] == "crop" and steps and steps[-1][0] == "crop":
            *steps, (_, x0, y0, _, _) = steps
            step = ["crop", step[1] + x0, step[2] + y0, step[3] + x0, step[4] + y0]
        if (pixels := some_pixels(result)) is not None:
            self.known.pop(key := (size_of(result), pixels.tobytes()), None)
            self.known[key] = [*steps, step]

    def of(self, picture: object) -> list | None:
        """The steps to this picture: remembered, or found in the input, or else those of a picture
        with its proportions, which it may be an edit of. None: it is like nothing known."""
        if (pixels := some_pixels(picture)) is None:
            return None
        (w, h), laid = size_of(picture), []
        for way in range(8):
            laid.append(((h, w) if way in (1, 3, 4, 6) else (w, h), lay(pixels, way)))
            if (steps := self.known.get((laid[-1][0], laid[-1][1].tobytes()))) is not None:
                return [*steps, *turn_back(way, w, h)]
        array = np.asarray(picture)
        if self.searches and array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3:
            self.searches -= 1
            self.whole = np.asarray(self.image) if self.whole is None else self.whole
            if steps := find(array, self.whole):
                return steps
        alike = []  # how well it follows what is known, newest first, and the steps to it
        for ((wide, high), some), steps in reversed(self.known.items()):
            for way, ((to_w, to_h), turned) in enumerate(laid):  # up to a rounded side
                if len(alike) < 80 and abs(to_w * high - to_h * wide) <= max(w, h, wide, high):
                    follows = abs(correlation(np.frombuffer(some, int), turned.ravel()))
                    resize = ["pil", to_w, to_h, Image.BICUBIC, 0, 0, wide, high, None]
                    claim = [*steps, *[resize] * ((to_w, to_h) != (wide, high))]
                    follows += 0.08 * (not way and not alike)  # ours: text looks alike flipped
                    alike.append((follows, claim + turn_back(way, w, h)))
        return max(alike, key=lambda pair: pair[0])[1] if alike else None


def size_of(picture: Image.Image | np.ndarray) -> tuple[int, int]:
    return picture.size if isinstance(picture, Image.Image) else picture.shape[1::-1]


def spread(n: int) -> list[int]:
    """Six places along a side of n pixels, the same from both ends."""
    near = 0, (n - 1) // 5, 2 * (n - 1) // 5
    return [*near, *(n - 1 - i for i in reversed(near))]


def some_pixels(picture: object) -> np.ndarray | None:
    """36 pixels, [6, 6], each the sum of its channels: the same in RGB and BGR, and turned if the
    picture is. None for what is no picture."""
    if isinstance(picture, Image.Image) and min(picture.size):
        (xs, ys), at = map(spread, picture.size), picture.load()
        pixels = [at[x, y] for y in ys for x in xs]
        if picture.mode == "RGB":  # what nearly all are, three times as fast
            return np.array([*map(sum, pixels)]).reshape(6, 6)
        pixels = np.array(pixels)
    elif isinstance(picture, np.ndarray) and picture.ndim in (2, 3) and picture.size:
        pixels = picture[np.ix_(*map(spread, picture.shape[:2]))]
    else:
        return None
    if pixels.dtype.kind not in "uif":
        return None
    if pixels.dtype.kind == "f" and pixels.max() <= 1:
        pixels = (255 * pixels).round()
    colours = pixels.reshape(6, 6, -1)[..., :3]
    return colours.sum(2, dtype=int) * (3 // colours.shape[2])


def is_edit(crop: Image.Image, shown: Image.Image) -> bool:
    """Is `shown` the crop of the same size with another contrast, sharpness, colour, less noise?

    It is if its gray follows that of the crop, by the tone curve that fits best; if it keeps the
    detail; and if no window holds anything that the crop's own pixels there do not explain."""
    factor = -(-max(crop.size) // LONGEST)
    true, seen = (np.asarray(i.reduce(factor), np.float32) for i in (crop, shown))
    if min(true.shape[:2]) < WINDOW:
        return False
    channels = np.moveaxis(true, 2, 0)
    strong = np.stack([(10 * x - 9 * blur(x)).clip(0, 255) for x in channels], 2)  # sharpened most
    edited, grays = seen @ LUMA, (true @ LUMA, *channels, strong @ LUMA)
    gray = max(grays, key=lambda gray: correlation(tone(gray, edited), edited))
    toned = tone(gray, edited)
    if edited.std() < max(1, gray.std() / 8) or correlation(toned, edited) < LEAST_CORRELATION:
        return False
    if min(lost(gray, edited), lost(toned, edited)) > MOST_LOST:
        return False
    smooth = np.asarray(crop.reduce(factor).filter(ImageFilter.MedianFilter(3)), np.float32)
    for channel, weight in enumerate((1, 1, 0.5)):  # blue is seen least
        x, y = channels[channel], seen[..., channel]
        near, box, sharp = blur(x, cross=True), blur(x), strong[..., channel]
        features = [*channels, near, box, blur(box), smooth[..., channel], sharp, sharp - x]
        features[-1][1:-1, 1:-1] = 0  # at the rim, some filters do nothing
        features += [tone(x, y), tone(gray, y), (2 * x - box).clip(0, 255)]
        features += [(5 * x - 4 * near).clip(0, 255)]  # sharpened, as is the one before
        stack = np.stack([*features, y], 2)
        if weight * max(unexplained(stack, first) for first in (0, WINDOW // 2)) > MOST_STRANGE:
            return False
    return True


LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # Pillow's and OpenCV's gray


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / max(np.sqrt((a * a).sum() * (b * b).sum()), 1e-6))


def tone(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x under the curve that comes closest to y: mean y of each 64th of the pixels, by their x."""
    levels = x.round().astype(np.uint8)
    group = (np.bincount(levels.ravel(), minlength=256).cumsum() * 63 // x.size)[levels].ravel()
    counts = np.bincount(group)
    knots = [np.bincount(group, v.ravel())[counts > 0] / counts[counts > 0] for v in (x, y)]
    return np.interp(np.arange(256), *knots)[levels].astype(np.float32)


def blur(x: np.ndarray, cross: bool = False) -> np.ndarray:
    """The mean of 3x3 pixels; cross: of the four beside each."""
    p = np.pad(x, 1, mode="edge")
    if cross:
        return (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]) / 4
    p = p[:-2] + p[1:-1] + p[2:]
    return (p[:, :-2] + p[:, 1:-1] + p[:, 2:]) / 9


def lost(true: np.ndarray, seen: np.ndarray) -> float:
    """How much of the crop's detail, its variance at half the size within 3x3 pixels, is not in
    what was shown, from 0 to 1. A gray level of it is rounding."""
    details = []
    for gray in true, seen:
        h, w = (n // 2 * 2 for n in gray.shape)
        half = gray[:h, :w].reshape(h // 2, 2, w // 2, 2).mean((1, 3))
        details.append(half - blur(half))
    a, b = details
    left = (a * b).mean() ** 2 / max((b * b).mean(), 1e-9)
    return float(max((a * a).mean() - left - 1, 0) / max((a * a).mean(), 1e-9))


def unexplained(stack: np.ndarray, first: int) -> float:
    """The standard deviation that least squares over the first channels leave of the last one, in
    the worst window from row and column `first` on; up to twice that where the crop is plain."""
    starts = [[*range(first, n - WINDOW, WINDOW), n - WINDOW] for n in stack.shape[:2]]
    cut = np.lib.stride_tricks.sliding_window_view(stack, (WINDOW, WINDOW), (0, 1))
    windows = cut[np.ix_(*starts)].reshape(-1, stack.shape[2], WINDOW * WINDOW).swapaxes(1, 2)
    windows = windows - windows.mean(1, keepdims=True)
    x, y = windows[..., :-1], windows[..., -1:]
    ridge = WINDOW * WINDOW * np.eye(x.shape[2], dtype=np.float32)
    left = y - x @ np.linalg.solve(x.swapaxes(1, 2) @ x + ridge, x.swapaxes(1, 2) @ y)
    marks, own = (np.sqrt((v**2).mean(1)).max(1) for v in (left, x[..., :3]))
    return float((marks * np.maximum(1, 2 / (1 + own / 50))).max())
