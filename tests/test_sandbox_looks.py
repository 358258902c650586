"""
python -m pytest tests/test_sandbox_looks.py       about half a minute; no GPU, no network
python tests/test_sandbox_looks.py                 writes docs/looks.md again

Ways to look at a part of an image, as a policy writes them, and what the sandbox makes of each.
docs/looks.md is what these programs gave; a test holds the two against each other.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kit.sandbox_looks import lay, same_pixels  # noqa: E402
from sandbox import Sandbox  # noqa: E402

TABLE = Path(__file__).resolve().parent.parent / "docs" / "looks.md"
BOX = (200, 150, 400, 300)


def scene() -> Image.Image:
    """A picture with edges, waves and some noise, like a photograph in what editing does to it."""
    rng, (y, x) = np.random.default_rng(3), np.mgrid[:600, :800].astype(float)
    waves = [
        127 + 50 * np.sin(x / (19 + 3 * k) + k) + 40 * np.cos(y / 23 - x / 61) for k in range(3)
    ]
    pixels = np.stack(waves, axis=2)
    for _ in range(150):
        x0, y0, w, h = rng.integers((0, 0, 8, 8), (780, 580, 60, 60))
        pixels[y0 : y0 + h, x0 : x0 + w] = 0.4 * pixels[
            y0 : y0 + h, x0 : x0 + w
        ] + 0.6 * rng.integers(0, 256, 3)
    return Image.fromarray((pixels + rng.normal(0, 3, pixels.shape)).clip(0, 255).astype(np.uint8))


PICTURE = scene()
OPEN = "img = Image.open(image_path)\n"
READ = "a = cv2.imread(image_path)\n"
ARRAY = "a = np.array(image)\n"
RGB = READ + "a = cv2.cvtColor(a, cv2.COLOR_BGR2RGB)\n"
C = "c = image.crop(B)\n"
PART = "c = a[150:300, 200:400]\n"
FROM = "Image.fromarray(c).show()"
WRITE = "cv2.imwrite('c.png', c)"

# A class -> programs. B stands for the box.
CREDITED = {
    "crop": [
        "image.crop(B).show()",
        C + "c",
        C + "c.save('c.png')",
        C + "c.save('/mnt/data/temp_processed_images/c.jpg')",
        "x1, y1, x2, y2 = B\nimage.crop((x1, y1, x2, y2)).save('crop.png')",
        "w, h = image.size\nimage.crop((w * 0.25, h * 0.25, w * 0.5, h * 0.5)).show()",
        "image.crop((0.25, 0.25, 0.5, 0.5)).show()",
        OPEN + "img.crop(B).show()",
        "img = Image.open('image.png')\nimg.crop(B).show()",
        "img = Image.open('/mnt/data/image.jpg')\nimg.crop(B).save('/mnt/data/c.png')",
        "with open('image.png', 'rb') as f:\n    Image.open(f).crop(B).show()",
        "data = Path('image.png').read_bytes()\nImage.open(io.BytesIO(data)).crop(B).show()",
        C + "b = io.BytesIO()\nc.save(b, format='PNG')\nb.seek(0)\nImage.open(b).show()",
        C + "c.save('c.png')\nImage.open('c.png').show()",
        C + "c.copy().convert('RGBA').convert('RGB').show()",
        "image.crop((150, 100, 500, 400)).crop((50, 50, 250, 200)).show()",
        "c = image\nfor _ in range(10):\n    c = c.crop((9, 9, c.width - 9, c.height - 9))\nc",
        "np.array(image.crop(B))",
        C + "a = np.array(c)\n" + "Image.fromarray(a).show()",
        ARRAY + PART + FROM,
        ARRAY + "c = a[150:300, 200:400].copy()\n" + FROM,
        ARRAY + "c = np.ascontiguousarray(a[150:300, 200:400])\n" + FROM,
        ARRAY + "c = a[150:300, 200:400, :].astype(np.uint8)\n" + FROM,
        ARRAY + "c = a[150:300][:, 200:400]\n" + FROM,
        ARRAY + "c = a[np.s_[150:300, 200:400]]\n" + FROM,
        ARRAY + "rows = a[150:300]\nc = np.hstack([rows[:, 200:300], rows[:, 300:400]])\n" + FROM,
        ARRAY + "c = np.take(np.take(a, range(150, 300), 0), range(200, 400), 1)\n" + FROM,
        ARRAY + "c = a.astype(float)[150:300, 200:400]\nImage.fromarray(c.astype(np.uint8)).show()",
        "a = np.asarray(image) / 255\nc = (a * 255).round().astype(np.uint8)[150:300, 200:400]\n"
        + FROM,
        "a = np.frombuffer(image.tobytes(), np.uint8).reshape(600, 800, 3)\n" + PART + FROM,
        READ + PART + WRITE,
        READ + PART + "cv2.imshow('crop', c)\ncv2.waitKey(0)",
        "a = cv2.imread('image.png')\nh, w = a.shape[:2]\nc = a[h // 4:h // 2, w // 4:w // 2]\n"
        + WRITE,
        READ + PART + "c = cv2.cvtColor(c, cv2.COLOR_BGR2RGB)\n" + FROM,
        RGB + PART + FROM,
        READ + "c = a[150:300, 200:400, ::-1]\n" + FROM,
        READ + PART + FROM,
        READ + "c = cv2.getRectSubPix(a, (201, 151), (300, 225))\n" + WRITE,
        "a = cv2.imdecode(np.fromfile('image.png', np.uint8), cv2.IMREAD_COLOR)\n" + PART + WRITE,
        READ + PART + "cv2.imwrite('c.png', c)\nImage.open('c.png').save('d.png')",
        "a = plt.imread('image.png')\nplt.imsave('c.png', a[150:300, 200:400])",
        "plt.imsave('c.png', np.array(image)[150:300, 200:400])",
        "ImageOps.crop(image.crop((190, 140, 410, 310)), 10).show()",
        "from IPython.display import display\ndisplay(image.crop(B))",
        "b, g, r = cv2.split(cv2.imread(image_path))\nc = cv2.merge([r, g, b])[150:300, 200:400]\n"
        + FROM,
        "def zoom(box):\n    return image.crop(box)\nzoom(B)",
        C + "c.save('a.png')\nos.makedirs('out')\nos.rename('a.png', 'out/b.png')",
        C + "p = tempfile.mktemp(suffix='.png')\nc.save(p)\nImage.open(p).show()",
        C
        + "from IPython.display import display, Image as Shown\n"
        + "c.save('/mnt/data/c.png')\ndisplay(Shown('/mnt/data/c.png'))",
    ],
    "resized": [
        C + "c.resize((400, 300)).show()",
        C + "c.resize((c.width * 3, c.height * 3), Image.LANCZOS).save('zoom.png')",
        C + "c.resize((600, 450), Image.BICUBIC)",
        C + "c.resize((600, 450), Image.NEAREST)",
        C + "c.resize((100, 75), Image.BOX)",
        "image.resize((400, 300), box=(200.5, 150.5, 400, 300)).show()",
        C + "c.thumbnail((128, 128))\nc.show()",
        "ImageOps.fit(image.crop(B), (256, 256)).show()",
        "ImageOps.scale(image.crop(B), 2).show()",
        "ImageOps.contain(image.crop(B), (640, 640)).show()",
        C + "for _ in range(5):\n    c = c.crop((5, 5, c.width - 5, c.height - 5))\n"
        "    c = c.resize((400, 300))\nc.show()",
        "image.resize((1600, 1200)).crop((400, 300, 800, 600)).show()",
        READ
        + "c = cv2.resize(a[150:300, 200:400], None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC)\n"
        + WRITE,
        READ + PART + "c = cv2.resize(c, (400, 300))\n" + WRITE,
        READ + PART + "c = cv2.resize(c, (300, 225), interpolation=cv2.INTER_LANCZOS4)\n" + WRITE,
        READ + PART + "c = cv2.resize(c, (100, 75), interpolation=cv2.INTER_AREA)\n" + WRITE,
        READ
        + PART
        + "c = cv2.resize(c, (0, 0), fx=2.3, fy=2.3, interpolation=cv2.INTER_NEAREST)\n"
        + WRITE,
        RGB + PART + "c = cv2.resize(c, (600, 450), interpolation=cv2.INTER_LINEAR)\n" + FROM,
        ARRAY + PART + "Image.fromarray(c).resize((400, 300)).show()",
        C
        + "c.save('c.png')\nc = cv2.imread('c.png')\n"
        + "cv2.imwrite('d.png', cv2.resize(c, None, fx=3, fy=3))",
        READ + PART + "c = cv2.resize(cv2.resize(c, None, fx=2, fy=2), None, fx=2, fy=2)\n" + WRITE,
        "image.crop((200, 150, 212, 166)).show()",
        "c = image\nfor _ in range(30):\n    c = c.crop((3, 3, c.width - 3, c.height - 3))\n"
        "c.resize((930, 630)).show()",
    ],
    "turned": [
        "image.crop(B).rotate(90, expand=True).show()",
        "image.crop(B).rotate(180).show()",
        "image.crop(B).transpose(Image.ROTATE_270).show()",
        "image.crop(B).transpose(Image.FLIP_LEFT_RIGHT).show()",
        "ImageOps.mirror(image.crop(B)).show()",
        "ImageOps.flip(image.crop(B)).show()",
        "image.rotate(90, expand=True).crop((150, 400, 300, 600)).show()",
        ARRAY + "c = np.rot90(a[150:300, 200:400])\n" + FROM,
        ARRAY + "c = a[150:300, 200:400][::-1]\n" + FROM,
        ARRAY + "c = np.fliplr(a[150:300, 200:400])\n" + FROM,
        READ + PART + "c = cv2.rotate(c, cv2.ROTATE_90_CLOCKWISE)\n" + WRITE,
        READ + PART + "c = cv2.flip(c, 1)\n" + WRITE,
        "image.crop(B).transpose(Image.TRANSPOSE).show()",
    ],
    "edited": [
        "ImageEnhance.Contrast(image.crop(B)).enhance(1.5).show()",
        C + "c = ImageEnhance.Contrast(c).enhance(2.0)\nc.save('c.png')",
        "ImageEnhance.Contrast(image).enhance(2).crop(B).resize((400, 300)).show()",
        "ImageEnhance.Brightness(image.crop(B)).enhance(1.5).show()",
        "ImageEnhance.Brightness(image.crop(B)).enhance(0.6).show()",
        "ImageEnhance.Sharpness(image.crop(B)).enhance(3).show()",
        C + "c = c.resize((400, 300), Image.LANCZOS)\nImageEnhance.Sharpness(c).enhance(2).show()",
        "ImageEnhance.Color(image.crop(B)).enhance(0.3).show()",
        "image.crop(B).convert('L').show()",
        C + "ImageOps.autocontrast(c).show()",
        C + "ImageOps.autocontrast(c.convert('L'), cutoff=2).show()",
        C + "ImageOps.equalize(c).show()",
        C + "ImageOps.invert(c).show()",
        C + "c.filter(ImageFilter.SHARPEN).show()",
        C + "c.filter(ImageFilter.UnsharpMask(2, 150, 3)).show()",
        C + "c.filter(ImageFilter.MedianFilter(3)).show()",
        C + "c.filter(ImageFilter.GaussianBlur(0.8)).show()",
        C + "c.point(lambda p: min(255, int(p * 1.4))).show()",
        C + "c.save('c.jpg')\nImage.open('c.jpg').resize((400, 300)).save('d.png')",
        READ + PART + "c = cv2.cvtColor(c, cv2.COLOR_BGR2GRAY)\n" + WRITE,
        READ
        + PART
        + "g = cv2.cvtColor(c, cv2.COLOR_BGR2GRAY)\n"
        + "c = cv2.createCLAHE(clipLimit=2.0, tileGridSize=(8, 8)).apply(g)\n"
        + WRITE,
        READ + PART + "c = cv2.equalizeHist(cv2.cvtColor(c, cv2.COLOR_BGR2GRAY))\n" + WRITE,
        READ + PART + "c = cv2.convertScaleAbs(c, alpha=1.3, beta=10)\n" + WRITE,
        READ
        + PART
        + "k = np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]])\nc = cv2.filter2D(c, -1, k)\n"
        + WRITE,
        READ + PART + "c = cv2.fastNlMeansDenoisingColored(c, None, 5, 5, 7, 21)\n" + WRITE,
        READ + PART + "c = cv2.bilateralFilter(c, 9, 75, 75)\n" + WRITE,
        READ + PART + "c = cv2.GaussianBlur(c, (3, 3), 0)\n" + WRITE,
        ARRAY + "c = (255 * (a[150:300, 200:400] / 255) ** 0.7).astype(np.uint8)\n" + FROM,
        ARRAY + "c = np.repeat(np.repeat(a[150:300, 200:400], 2, axis=0), 2, axis=1)\n" + FROM,
        READ + "c = cv2.pyrUp(a[150:300, 200:400])\n" + WRITE,
        READ
        + PART
        + "c = cv2.addWeighted(c, 1.5, cv2.GaussianBlur(c, (0, 0), 3), -0.5, 0)\n"
        + WRITE,
        READ
        + PART
        + "l, a, b = cv2.split(cv2.cvtColor(c, cv2.COLOR_BGR2LAB))\n"
        + "l = cv2.createCLAHE(clipLimit=3.0, tileGridSize=(8, 8)).apply(l)\n"
        + "c = cv2.cvtColor(cv2.merge((l, a, b)), cv2.COLOR_LAB2BGR)\n"
        + WRITE,
    ],
}
DRAW = C + "from PIL import ImageDraw\nd = ImageDraw.Draw(c)\n"
# A reason -> programs that are credited with nothing, all of them drawings but for figures.
REFUSED = {
    "a figure has axes and a resolution of its own": [
        "plt.imshow(image.crop(B))\nplt.axis('off')\nplt.show()",
        ARRAY + "fig, ax = plt.subplots()\nax.imshow(a[150:300, 200:400])\nplt.savefig('c.png')",
        "plt.hist(np.array(image.crop(B)).ravel(), 64)\nplt.show()",
    ],
    "something is drawn on it that the image does not hold": [
        DRAW + "d.rectangle((20, 20, 80, 80), outline='red', width=3)\nc.show()",
        DRAW + "d.text((40, 40), 'the answer is B', fill='yellow')\nc.show()",
        READ + PART + "cv2.rectangle(c, (20, 20), (80, 80), (0, 255, 0), 2)\n" + WRITE,
        READ + PART + "cv2.circle(c, (100, 70), 12, (0, 0, 255), 2)\n" + WRITE,
        "m = Image.new('RGB', image.size)\nm.paste(image.crop(B), (200, 150))\nm.show()",
        C + "c.paste((0, 0, 0), (0, 0, 100, 150))\nc.show()",
        C + "c.paste(c.crop((0, 0, 60, 60)), (120, 70))\nc.show()",
        "Image.new('RGB', (200, 150), 'white')",
        ARRAY
        + "c = a[150:300, 200:400] // 3 + np.linspace(0, 170, 200)[:, None].astype(np.uint8)\n"
        + FROM,
    ],
    "a border or a second picture is joined to it": [
        "ImageOps.expand(image.crop(B), border=10, fill='white').show()",
        "ImageOps.pad(image.crop(B), (300, 300)).show()",
        ARRAY + "c = np.hstack([a[150:300, 200:400], a[300:450, 0:200]])\n" + FROM,
        "m = Image.new('RGB', (400, 150))\nm.paste(image.crop(B), (0, 0))\n"
        "m.paste(image.crop((0, 0, 200, 150)), (200, 0))\nm.show()",
    ],
    "the detail was thrown away": [
        "image.crop(B).resize((1, 1)).resize((280, 160)).show()",
        "image.crop(B).resize((20, 15)).resize((200, 150), Image.NEAREST).show()",
        READ
        + PART
        + "c = cv2.resize(cv2.resize(c, (25, 19)), (200, 150), interpolation=cv2.INTER_NEAREST)\n"
        + WRITE,
        ARRAY + "c = np.kron(a[150:300:6, 200:400:6], np.ones((6, 6, 1), np.uint8))\n" + FROM,
        "image.crop(B).filter(ImageFilter.GaussianBlur(8)).show()",
    ],
    "what is left of it is edges, levels or a warp": [
        READ + PART + "c = cv2.Canny(c, 100, 200)\n" + WRITE,
        C + "c.convert('L').point(lambda p: 255 * (p > 128)).show()",
        "image.crop(B).rotate(30).show()",
        C + "Image.blend(c, image.crop((0, 0, 200, 150)), 0.5).show()",
    ],
}
CASES = {program: ("", kind) for kind, programs in CREDITED.items() for program in programs}
CASES |= {program: (reason, None) for reason, programs in REFUSED.items() for program in programs}


def class_of(program: str) -> tuple[str, bool]:
    """What the sandbox makes of the program's last picture, and whether it gives it a box."""
    with Sandbox(PICTURE) as sandbox:
        seen = sandbox.run(re.sub(r"\bB\b", str(BOX), program))
    assert seen.error is None and seen.environment is None and seen.images, (program, seen)
    assert set(seen.red_lines) <= {"no_op"}, (program, seen)
    image, box, source = seen.images[-1], seen.boxes[-1], seen.sources[-1]
    if box is None:
        return ("figure" if source == "figure" else "drawn"), False
    if source == "edited":
        return "edited", True
    crop, pixels = np.asarray(PICTURE.crop(box)), np.asarray(image)
    if same_pixels(crop, pixels):
        return "crop", True
    turned = any(same_pixels(lay(crop, way), pixels) for way in range(8))
    return ("turned" if turned else "resized"), True


def code(program: str) -> str:
    return "<br>".join(f"`{line}`".replace("|", "\\|") for line in program.split("\n"))


def table(classes: dict[str, tuple[str, bool]]) -> str:
    credited = sum(box for _, box in classes.values())
    lines = [
        "# Ways to look, and what the sandbox makes of them",
        "",
        f"`python tests/test_sandbox_looks.py` ran these {len(classes)} programs on one image",
        f"and wrote this page. {credited} of them are credited. `B` is the box {BOX}.",
        "",
        "A credited picture has a box in the image, so that the judge of boxes can score it. Its",
        "class says how the trainer knows.",
        "",
        "- crop: its pixels stand in the image",
        "- turned: they do, turned by quarters or flipped",
        "- resized: the trainer repeats the crops and resizes, and gets its pixels",
        "- edited: it follows such a crop in every window, but for contrast, colour, sharpness or",
        "  noise; `sources` tells it apart",
        "",
        "What is drawn, or a figure, has no box, for the reason given.",
        "",
        "| program | class | box | why not |",
        "| --- | --- | --- | --- |",
    ]
    for program, (kind, box) in classes.items():
        lines.append(
            f"| {code(program)} | {kind} | {'yes' if box else 'no'} | {CASES[program][0]} |"
        )
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def classes():
    return {program: class_of(program) for program in CASES}


@pytest.mark.parametrize("program", CASES)
def test_each_program_has_the_class_that_it_should(program, classes):
    kind, box = classes[program]
    reason, expected = CASES[program]
    assert box is not bool(reason) and (expected or kind) == kind, (kind, box)


def test_the_table_is_what_the_programs_gave(classes):
    assert len(classes) >= 100 and sum(box for _, box in classes.values()) >= 80
    assert TABLE.read_text() == table(classes)


if __name__ == "__main__":
    TABLE.write_text(table({program: class_of(program) for program in CASES}))
