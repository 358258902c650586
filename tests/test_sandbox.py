"""
python -m pytest tests/test_sandbox.py        under a minute on two busy cores; no GPU, no network

What the sandbox does for the policy: repairs, observations, crops with boxes, red lines.
The forty forgiving cases F01 to F40 are one table; then come the laws behind them.
What it does against the policy is in test_sandbox_hostile.py.
"""

import ast
import io
import math
import time
from functools import partial

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from kit import sandbox_looks
from kit.sandbox_repair import forbidden_call, parses, repair
from kit.sandbox_walls import png
from sandbox import Limits, Observation, Sandbox, verified

W, H = 800, 600
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def picture(width: int = W, height: int = H) -> Image.Image:
    """No two places look alike, so that a crop has one box only."""
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 256, (height, width))
    return Image.fromarray(np.stack([x % 256, y % 256, noise], axis=2).astype(np.uint8))


PICTURE = picture()


@pytest.fixture
def box():
    with Sandbox(PICTURE, Limits(file=1000)) as box:  # a file may be as large as the input as well
        yield box


@pytest.fixture(scope="module")
def shared():
    with Sandbox(PICTURE) as box:
        yield box


def check(seen, boxes=(), text="", error="", notes=(), red=(), sources=None, sizes=None):
    """The observation holds this and no more: verified crops pixel for pixel, unless `sources` are
    others; one note with each of these words; these red lines."""
    notes = (notes,) if isinstance(notes, str) else notes
    assert (seen.boxes, seen.text, seen.red_lines) == ([*boxes], text, [*red]), seen
    assert error in seen.error if error else seen.error is None, seen
    assert len(notes) == len(seen.notes) and all(map(str.__contains__, seen.notes, notes)), seen
    assert seen.sources == (sources or ["crop"] * len(boxes)), seen
    for image, crop in zip(seen.images, boxes):
        assert crop is None or image.tobytes() == PICTURE.crop(crop).resize(image.size).tobytes()
    assert sizes in (None, [image.size for image in seen.images])


CROP, BOX = "image.crop((50, 40, 149, 139))", dict(boxes=[(50, 40, 149, 139)])
FAILED = ["sandbox_error"]

# Each case: a program, what it must show; perhaps another in the same sandbox, and so on.
# fmt: off
CASES = {
    "F01 fence": (f"```python\n{CROP}.show()\n```", dict(BOX, notes="markdown")),
    "F02 uniform indentation": ("    w = 3\n    print(w)", dict(text="3\n", notes="indentation")),
    "F03 first line at column 0": ("w = 3\n    print(w)", dict(text="3\n", notes="indentation")),
    "F04 tabs and spaces": ("for i in range(2):\n\tx = i * 2\n        print(x)",
        dict(text="0\n2\n", notes="indentation")),
    "F05 no imports": ("print(np.array(image).shape, cv2.__name__, math.pi > 3, os.sep)",
        dict(text="(600, 800, 3) cv2 True /\n")),
    "F06 invented absolute path": (
        "Image.open('/mnt/data/image.jpg').crop((50, 40, 149, 139)).save('/mnt/data/crop.jpg')",
        dict(BOX, notes=("took the input image", "written to crop.jpg"))),
    "F07 placeholder path with cv2": ("print(cv2.imread('path_to_image.jpg').shape)",
        dict(text="(600, 800, 3)\n", notes="took the input image")),
    "F08 missing directory": (
        f"{CROP}.save('outputs/crops/a.png')", dict(BOX, notes="made the folder outputs/crops")),
    "F09 reversed corners": ("image.crop((400, 300, 100, 50)).save('c.png')",
        dict(boxes=[(100, 50, 400, 300)], notes="sorted; for x, y, width, height use")),
    "F10 out of range": ("image.crop((600, 400, 1200, 900)).save('c.png')",
        dict(boxes=[(600, 400, 800, 600)], notes="clamped", red=["invalid_coords"])),
    "F11 floats": ("image.crop((10.6, 20.2, 110.4, 99.9)).save('c.png')",
        dict(boxes=[(10, 20, 111, 100)], notes="rounded outwards", sizes=[(101, 80)])),
    "F12 fractions": ("image.crop((0.25, 0.5, 0.75, 1.0)).save('c.png')",
        dict(boxes=[(200, 300, 600, 600)], notes="scaled")),
    "F13 outside": ("image.crop((900, 700, 1000, 800)).save('c.png')",
        dict(error="ValueError: crop box (900, 700, 1000, 800) is empty or outside the 800x600",
             red=["invalid_coords", *FAILED])),
    "F14 NaN": ("kept = 7\nimage.crop((float('nan'), 0, 100, 100)).save('c.png')",
        dict(error="NaN", red=["invalid_coords", *FAILED]), "print(kept)", dict(text="7\n")),
    "F15 float slice": (
        "h, w = 600, 800\nImage.fromarray(np.array(image)[h/4:h/2, w*0.25:w*0.75]).save('c.png')",
        dict(boxes=[(200, 150, 600, 300)], notes="rounded")),
    "F16 negative computed bound": ("arr = cv2.imread(image_path)\ncx, cy = 30, 40\n"
        "ok = cv2.imwrite('c.png', arr[cy-100:cy+100, cx-100:cx+100])",
        dict(boxes=[(0, 0, 130, 140)], notes=("start -60 set to 0", "start -70 set to 0"))),
    "F17 image.show": (f"crop = {CROP}\ncrop.show()", BOX),
    "F18 plt.show without figure": ("plt.show()", dict(notes="no figure")),
    "F19 plt.imshow": ("plt.figure(figsize=(4, 3))\nplt.imshow(image)\nplt.axis('off')\nplt.show()",
        dict(boxes=[None], sources=["figure"], sizes=[(400, 300)]),
        "print(plt.get_fignums())", dict(text="[]\n")),
    "F20 print only": ("print('mean', round(float(np.array(image.convert('L')).mean()), 1))",
        dict(text="mean 118.9\n")),
    "F21 last expression, image": (f"{CROP}.resize((600, 600))", dict(BOX, sizes=[(600, 600)])),
    "F22 last expression, value": ("w, h = image.size\nw * h", dict(text="480000\n")),
    "F23 return at top level": (f"crop = {CROP}\ncrop.save('c.png')\nreturn crop", BOX),
    "F24 input()": ("print(input('Which region? '))", dict(error="EOFError", red=FAILED)),
    "F25 cv2.imshow": ("cv2.imshow('crop', cv2.imread(image_path)[40:139, 50:149])\n"
        "cv2.waitKey(0)\ncv2.destroyAllWindows()", BOX),
    "F26 nothing shown": (f"cropped = {CROP}", dict(BOX, notes="this is cropped")),
    "F27 two crops": ("for i, b in enumerate([(0, 0, 200, 200), (200, 200, 500, 500)]):\n"
        "    image.crop(b).save(f'crop_{1-i}.png')",
        dict(boxes=[(0, 0, 200, 200), (200, 200, 500, 500)])),
    "F28 RGBA as JPEG": (f"{CROP}.convert('RGBA').save('c.jpg')", dict(BOX, notes="RGB for JPEG")),
    "F29 typographic quotes": ("print(“a”, ‘b’)", dict(text="a b\n", notes="typographic")),
    "F30 stray fence and word": ("print(1+1)\n```\npython", dict(text="2\n", notes="markdown")),
    "F31 unfinished last line": (f"{CROP}.save('c.png')\nprint('saved to",
        dict(BOX, notes="left out the unfinished end: \"print('saved to")),
    "F31 three unfinished lines, and four": (
        "print(1)\nf(\n2,\n3", dict(text="1\n", notes="left out the unfinished end"),
        "print(1)\nf(\n2,\n3,\n4", dict(error="SyntaxError", red=FAILED)),
    "F32 exit()": (f"{CROP}.save('c.png')\nkept = 3\nprint('ok')\nexit()",
        dict(BOX, text="ok\n", notes="exit()"), "print(kept)", dict(text="3\n")),
    "F33 state": ("import numpy as xx\nside = 10\ndef area(b): return b[2] * side", {},
        "print(area((0, 0, 4, 3)), xx.__name__)", dict(text="40 numpy\n")),
    "F34 state after an error": (
        "y = 5\nraise RuntimeError('boom')", dict(error="boom", red=FAILED),
        "print(y)", dict(text="5\n")),
    "F35 image overwritten": ("image = image.rotate(90, expand=True)\nprint('turned')",
        dict(text="turned\n"), "print(image.size)", dict(text="(600, 800)\n")),
    "F36 save over the input": (  # (which stays as it was: below, for every case)
        f"{CROP}.save(image_path)", dict(BOX, notes="written to image.png")),
    "F37 saved to a stream": (
        f"{CROP}.save(b := io.BytesIO(), format='PNG')\nprint(len(b.getvalue()) > 100)",
        dict(text="True\n")),
    "F38 percent signs": ("print('%d%% of %s' % (50, 'image'))", dict(text="50% of image\n")),
    "F39 notebook command": ("!pip install opencv-python\nimport cv2\nprint(1)",
        dict(text="1\n", notes="notebook")),
    "F40 savefig elsewhere": ("plt.plot([1,2,3])\nplt.savefig('/home/user/plot.png')",
        dict(boxes=[None], sources=["figure"], notes="written to plot.png")),

    **{f"{code!r} shows nothing": (code, {})
       for code in ("", "# I only think about it.", "\n\n", "pass", "'a note'")},
    "an error is one line": (
        "pass\nraise ValueError('bo\\nom')", dict(error="ValueError: bo om (line 2)", red=FAILED),
        "def f(:", dict(error="SyntaxError: ", red=FAILED), "import surely_missing",
        dict(error="ModuleNotFoundError: No module named 'surely_missing' (line 1)", red=FAILED)),
    "a missing file names those that are there": (
        f"{CROP}.save('crop_1.png')\nImage.open('crop_2.png')",
        dict(BOX, error="; files here: ['crop_1.png', 'image.png'] (line 2)", red=FAILED)),
    "a note is one line": (f"{CROP}.save('/a\\nb.png')", dict(BOX, notes="/a b.png written to a")),
    "text is what was printed, however": (
        "import sys\nprint('a')\nsys.stdout.buffer.write(b'b\\xff')\n"
        "sys.stderr.write('c')\nprint('\\ud800')\nsys.stdout.close()",
        dict(text="a\nb\ufffdc\\ud800\n")),
    "names stay, stand-ins come back": (
        "open = None; image = 3; import builtins; builtins.len = None\nPIL.Image.open = None", {},
        "open('a.txt', 'w').write('x')\nlen('ab'), image", dict(text="(2, 3)\n"),
        "Image.open(image_path).size", dict(text="(800, 600)\n")),
    "a file is shown as it ended": (
        "image.crop((0, 0, 50, 50)).save('c.png')\nimage.crop((9, 9, 60, 60)).show()\n"
        "image.crop((5, 5, 50, 50)).save('c.png')", dict(boxes=[(9, 9, 60, 60), (5, 5, 50, 50)])),
    "files written without Pillow are found, when they are new": (
        f"{CROP}.save(b := io.BytesIO(), 'PNG')\nos.makedirs('sub')\n"
        "open('sub/x.png', 'wb').write(b.getvalue())\nopen('y.png', 'wb').write(b'junk'); None",
        dict(BOX, notes="no image in 1 files: y.png"), "pass", {}),
    "equal pictures are shown once": (
        "for i in range(3):\n    c = image.crop((i, 0, i + 50, 50))\n    c.show()\n"
        "    c.save(f'{i}.png')", dict(boxes=[(i, 0, i + 50, 50) for i in range(3)])),
    "sizes fit the vision encoder": (
        "image.crop((10, 20, 20, 40)).show()\nimage.crop((0, 0, 101, 1)).show()\n"
        "Image.new('RGB', (6000, 100)).show()\nImage.new('RGB', (2000, 20)).show()",
        dict(boxes=[(10, 20, 20, 40), None, None], sources=["crop", "show", "show"],
             sizes=[(28, 56), (2048, 35), (2800, 28)],
             notes=["from 10x20 to 28x56", "101x1 is too thin", "6000x100", "2000x20"])),
    "an open figure is shown, a saved one not twice": (
        "plt.plot([1, 2]); None", dict(boxes=[None], sources=["figure"]),
        "plt.plot([1, 2]); plt.savefig('p.png', dpi=150); plt.show()",
        dict(boxes=[None], sources=["figure"])),
    "display shows any value": (f"display(1, {CROP})", dict(BOX, text="1\n")),
    "return inside a block ends the code, functions keep theirs": (
        "def f():\n    return 7\nfor i in range(9):\n    if i == 2:\n"
        "        return f() + i\n    print(i)\nprint('never')", dict(text="0\n1\n9\n")),
    "a bare except catches neither return nor exit()": (
        f"try:\n    return {CROP}\nexcept:\n    print('failed')", BOX,
        "try:\n    1 / 0\nexcept:\n    print('failed')\n    exit()\nprint('never')",
        dict(text="failed\n", notes="exit()")),
    "addresses in memory are not told": (
        "print(image, 'at 0x1F, too')\nImage.open(io.BytesIO(b'x'))",
        dict(text="<PIL.Image.Image image mode=RGB size=800x600> at 0x1F, too\n",
             error="cannot identify image file <_io.BytesIO object> (line 2)", red=FAILED)),
    "slices that mean to count from the end still do": (
        "a = np.arange(400).reshape(20, 20); k = 3\nprint(a[-5:-2, k:-k].shape, "
        "a[-k:, 2.5:6.2].shape, a[k-5:4, :].shape, a[..., 0].shape)",
        dict(text="(3, 14) (3, 5) (4, 20) (20,)\n",
             notes=("slice bounds rounded", "slice start -2 set to 0"))),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_forgiving_case(name, box):
    case = CASES[name]
    for code, expected in zip(case[::2], case[1::2]):
        check(box.run(code), **expected)
    seen = box.run("print(Image.open(image_path).size)")
    assert seen.text == "(800, 600)\n" and not seen.restarted


# Observations
@pytest.mark.parametrize("n", [1, 5, 6, 600])
def test_many_crops_in_one_program_are_bounded(box, n):
    """Five pictures and ten notes, and the worker lives."""
    code = "image.crop((i + 0.5, 0, i + 90, 50)).show()"
    seen = box.run(f"for i in range({n}): {code}")
    assert seen.boxes == [(i, 0, i + 90, 50) for i in range(min(n, 5))] and not seen.red_lines, seen
    assert len(seen.notes) == min(10, n + (n > 5)) and seen.error is None, seen
    assert n != 6 or seen.notes[-1] == "1 more images not shown"
    assert not box.run("1").restarted


@pytest.mark.parametrize("code, colour", [
    ("a", (255, 0, 0)),
    ("cv2.imshow('', a)", (0, 0, 255)),
    ("cv2.imwrite('b.png', a)", (0, 0, 255)),
    ("cv2.imshow('', np.ones((40, 40)))", (255, 255, 255)),
    ("cv2.imwrite('b.png', np.full((64, 64), 3000.0))", (255, 255, 255)),  # clipped, as by OpenCV
    ("Image.new('RGBA', (40, 40), (9, 9, 9, 0))", (255, 255, 255)),
    ("p.save('p.png', transparency=1)", (255, 255, 255)),  # a hidden colour is hidden
    ("p.save('p.gif', transparency=1); Image.open('p.gif').show()", (255, 255, 255)),
    ("p.save('p.gif', transparency=0); Image.open('p.gif').show()", (255, 0, 0)),
    ("np.linspace(0, 1, 1600).reshape(40, 40)", None),  # no picture
])  # fmt: skip
def test_arrays_are_shown_in_the_right_colours(box, code, colour):
    box.run("a = np.zeros((40, 40, 3), np.uint8); a[..., 0] = 255")
    box.run("p = Image.new('P', (40, 40), 1); p.putpalette([0, 0, 255, 255, 0, 0])")
    assert [i.getpixel((9, 9)) for i in box.run(code).images] == [colour] * (colour is not None)


SIXTEEN_BITS = """\
Image.fromarray(r).save('r.png')
Image.fromarray(r).show()
Image.fromarray(r)
Image.fromarray(r.astype(np.int32)).show()
Image.fromarray(r.astype(np.int32)).save('r.tif')
cv2.imwrite('r.png', r)
open('r.pgm', 'wb').write(b'P5 64 64 65535 ' + r.astype('>u2').tobytes())"""


@pytest.mark.parametrize("code", SIXTEEN_BITS.splitlines())
def test_16_bits_are_scaled_however_they_are_shown(box, code):
    ramp = "r = np.linspace(0, 65535, 4096).astype(np.uint16).reshape(64, 64)\n"
    (seen,) = box.run(ramp + code).images
    values = np.asarray(seen, dtype=float)
    assert values.mean() == pytest.approx(127.5, abs=0.5) and len(np.unique(values)) == 256


def test_orientation_is_applied_and_metadata_is_gone():
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "the answer is B"  # turned by 90 degrees; description
    picture(60, 40).save(raw := io.BytesIO(), "JPEG", exif=exif)
    with Sandbox(Image.open(raw)) as box:
        seen = box.run("image.size, dict(Image.open(image_path).getexif()), image_path[-9:]")
        assert seen.text == "((40, 60), {}, 'image.png')\n"
        assert "answer" not in box.run("print(open(image_path, 'rb').read())").text


# Honest programs
SAME = "; np.array_equal(np.array(Image.open(image_path)), np.array(image))"


@pytest.mark.parametrize("code, text", [
    ("os.path.exists('image.png'), glob.glob('*.png')", "(True, ['image.png'])"),
    ("np.array_equal(np.round(255 * plt.imread('image.png')), np.array(image))", "True"),
    ("len(np.fromfile('image.png', np.uint8)) == len(Path('image.png').read_bytes())", "True"),
    ("shutil.copy('image.png', 'b.bin'); cv2.imread('b.bin').shape", "(600, 800, 3)"),
    ("Path('/mnt/data/a/b').mkdir(parents=True); Path('/mnt/data/a').exists()", "True"),
    ("os.makedirs('/mnt/t'); open('/mnt/t/n.txt', 'w').write('x')\n"
     "os.path.exists('/mnt/t/n.txt'), sorted(os.listdir('/mnt/t'))",
     "(True, ['image.png', 'n.txt'])"),
    ("from IPython.display import display, clear_output\nclear_output()\ndisplay(7)", "7"),
    ("from IPython.core.display import display, SVG, HTML\ndisplay(7, HTML('<b>'))", "7"),
    ("import matplotlib; matplotlib.use('TkAgg'); plt.switch_backend('QtAgg'); plt.ioff()\n"
     "print(plt.get_backend())", "'agg'"),
    ("[os.path.exists(p) for p in ('/mnt/data/image_1.jpg', 'img-012.png', '/etc/passwd', "
     "'/mnt/data/never.png', 'chart.png')]", "[True, True, True, False, False]"),
    ("Image.open('image_12.jpeg').size, Image.open(r'C:\\me\\photo.png').size",
     "((800, 600), (800, 600))"),
    ("Image.new('L', (9, 8)).save(fp='a.png'); shutil.move(src='a.png', dst='b.png')\n"
     "cv2.imwrite(filename='c.png', img=cv2.imread(filename='b.png'))\n"
     "os.rename(src='c.png', dst='d.png'); os.remove(path='b.png')\n"
     "Image.open(fp='d.png').size, len(open(file='d.png', mode='rb').read()) > 9",
     "((9, 8), True)"),
    ("ImageFont.truetype('arial.ttf', 20).size", "20"),
    ("os.makedirs('d/e'); open('d/e/f', 'w').close(); shutil.rmtree('d')\n"
     "open('a', 'w').close(); Path('a').unlink()\n"
     "open('/tmp/o', 'w').close(); os.remove('/tmp/o'); os.listdir('.')", "['image.png']"),
    ("Image.new('RGB', (50, 50)).save('image.png'); Image.open('image.png').size", "(50, 50)"),
    ("open('image.png', 'w').write('x'); len(open('image.png').read())", "1"),
    ("Path('new').touch(); shutil.copy2('new', 'b'); os.path.isfile('b')", "True"),
    ("open('a', 'w').close(); os.rename('a', 'b'); os.replace('b', 'c'); os.stat('c')[6]", "0"),
    ("open('a', 'w').close(); os.mkdir('o'); shutil.move('a', 'o'); os.listdir('o')", "['a']"),
    ("open('a', 'w').close(); shutil.move('a', '/mnt/data/b'); os.path.isfile('b')", "True"),
    ("shutil.copy('image.png', '/mnt/data/b'); os.path.getsize('b') > 1_000_000", "True"),
    ("os.listdir('/mnt/data') + glob.glob('/mnt/data/*.png')",
     "['image.png', '/mnt/data/image.png']"),
    ("np.save('/home/me/a.npy', np.ones(3)); float(np.load('/home/me/a.npy').sum())", "3.0"),
    ("a = np.array(image); a[9.5:19.2, -9:5] = 0; bool((a[9:20, :5] == 0).all())", "True"),
    ("image.save('e.bmp'); os.path.getsize('e.bmp') > 1_000_000; None", "None"),
    ("random.random(), np.random.rand()", "(0.8444218515250481, 0.5488135039273248)"),
    ("import uuid; uuid.uuid4().hex[:8], tempfile.mkdtemp(), np.random.default_rng().random()",
     "('cd072cd8', '/work/tmp0', 0.595529283714828)"),
    ("list({'a', 'b', 'c'})", "['c', 'a', 'b']"),
    # The file in the working folder may be replaced, and the original not.
    ("image.crop((0, 0, 50, 50)).save('image.png')" + SAME, "True"),
    ("open('image.png', 'wb').write(b'x')" + SAME, "True"),
    ("cv2.imwrite('image.png', np.zeros((50, 50, 3), np.uint8))" + SAME, "True"),
    ("os.remove('image.png')" + SAME, "True"),
])  # fmt: skip
def test_honest_programs_run(box, code, text):
    seen = box.run(code)
    assert seen.error is None and (seen.text.strip() or "None") == str(eval(text)), seen
    assert not set(seen.red_lines) - {"no_op"}


def test_nothing_outside_the_folder_is_removed_or_moved_or_written_to(box):
    for path in "/etc/passwd", "..", "../image.png", "/usr/lib", "/":
        for call in "os.remove({})", "shutil.rmtree({})", "os.rmdir({})", "shutil.move({}, 'a')":
            assert "is not in the working folder" in box.run(call.format(repr(path))).error
    assert "PermissionError" in box.run("os.open('image.png', os.O_WRONLY)").error


# Crops and their boxes
number = st.integers(-1000, 1800) | st.floats(-1000, 1800) | st.floats(0, 1)
number |= st.sampled_from([math.nan, math.inf, 0, W, H, 1e300, -1e300])


@QUICK
@given(corners=st.tuples(number, number, number, number))
@example(corners=(-9, 0, 91, 100))  # 9 % outside
@example(corners=(-12, 0, 88, 100))
@example(corners=(90, 100, 0, 0))
@example(corners=(5, 5, 5, 50))
def test_any_box_gives_a_true_crop_or_an_error(shared, corners):
    """The recorded region lies in the image, holds the pixels shown, and the flag is exact."""
    shared.views = shared.views[:1]
    shared.run("from math import nan, inf")
    seen = shared.run(f"image.crop({corners!r}).show()")
    x0, y0, x1, y1 = corners
    if all(0 <= v <= 1 for v in corners) and any(v not in (0, 1) for v in corners):
        x0, y0, x1, y1 = x0 * W, y0 * H, x1 * W, y1 * H
    (x0, x1), (y0, y1) = sorted((x0, x1)), sorted((y0, y1))
    a, b, c, d = max(x0, 0), max(y0, 0), min(x1, W), min(y1, H)
    if not all(map(math.isfinite, corners)) or a >= c or b >= d:
        assert seen.error.startswith("ValueError: crop box (") and not seen.images
        assert seen.red_lines == ["invalid_coords", "sandbox_error"]
        return
    outside = 1 - (c - a) / (x1 - x0) * (d - b) / (y1 - y0)
    if abs(outside - 0.1) > 1e-9:
        assert ("invalid_coords" in seen.red_lines) == (outside > 0.1)
    a, b, c, d = expected = math.floor(a), math.floor(b), math.ceil(c), math.ceil(d)
    if max(c - a, d - b) > 100 * min(c - a, d - b):
        assert not seen.images
    else:
        assert seen.boxes == [expected] and seen.sources == ["crop"]
        if min(c - a, d - b) >= 28:
            assert seen.images[0].tobytes() == PICTURE.crop(expected).tobytes()
    assert bool(seen.notes) or list(expected) == list(corners)


@QUICK
@given(st.integers(0, 600), st.integers(0, 400), st.integers(40, 200), st.integers(40, 200),
       st.integers(1, 4), st.data())  # fmt: skip
def test_boxes_survive_chains_of_crops_and_resizes(shared, x, y, w, h, k, data):
    """Crop, enlarge k times, crop again at multiples of k: the box is exact."""
    a, b = data.draw(st.integers(0, w - 30)), data.draw(st.integers(0, h - 30))
    shared.views = shared.views[:1]
    seen = shared.run(
        f"big = image.crop(({x}, {y}, {x + w}, {y + h})).resize(({w * k}, {h * k}))\n"
        f"big.crop(({a * k}, {b * k}, {w * k}, {h * k})).show()"
    )
    assert seen.boxes == [(x + a, y + b, x + w, y + h)], seen
    assert seen.images[0].size == ((w - a) * k, (h - b) * k)


@pytest.mark.parametrize("code, expected", [
    ("c = image.crop((100, 100, 300, 300)).resize((400, 400), Image.LANCZOS)\n"
     "c.crop((100, 100, 300, 300))", (150, 150, 250, 250)),
    ("image.crop((8, 8, 88, 88)).save('a.jpg', quality=5)", (8, 8, 88, 88)),
    ("ImageOps.fit(image, (60, 60))", (100, 0, 700, 600)),
    ("a = cv2.cvtColor(cv2.imread(image_path), cv2.COLOR_BGR2RGB)\n"
     "Image.fromarray(a[10:60, 20:90][:, :40])", (20, 10, 60, 60)),
])  # fmt: skip
def test_ways_to_crop(box, code, expected):
    seen = box.run(code)
    assert (seen.boxes, seen.sources, seen.error) == ([expected], ["crop"], None), seen


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


def pil(width, height, to_width, to_height, how=Image.BICUBIC, gap=None):
    return ["pil", to_width, to_height, how, 0, 0, width, height, gap]


def seconds_on_a_core(function, *arguments):
    began = time.process_time()
    return function(*arguments), time.process_time() - began


@st.composite
def steps(draw):
    """A step of the right form; it may lack its end, or hold an odd value."""
    forms = [pil(W, H, 300, 300), pil(300, 300, 300, 300), ["crop", 0, 0, 300, 300]]
    forms += [["cv2", 0, 0, 0.5, 0.5, 2], ["affine", 300, 300, 1, 0, 9.5, 0, 1, 7, 0]]
    step = draw(st.sampled_from([*forms, ["warp", 300, 300, 0, 1, 0, 1, 0, 0, 17, 0]]).map(list))
    if draw(st.booleans()):
        odd = [10**400, math.nan, math.inf, True, "1", [1], -1, 0.5, None, 1 << 14, 1 << 24]
        step[draw(st.integers(1, len(step) - 1))] = draw(st.sampled_from(odd))
    return step[: draw(st.integers(0, 9))]


@given(anything | st.lists(steps(), max_size=3))
@example([pil(W, H, 1 << 24, 1)])
@example([pil(W, H, 1 << 14, 1 << 14)])
@example([pil(W, H, 1 << 14, 1)] * 24)
@example([["cv2", 1 << 14, 1 << 14, 0, 0, 4]])
@example([["cv2", 0, 0, 1e4, 1e4, 4]])
@example([pil(W, H, 300, 300, Image.LANCZOS), ["cv2", 300, 300, 0, 0, 99]])
@example([["affine", 300, 300, 0, 0, 9, 0, 0, 9, 0]])  # of one place
@example([["affine", 300, 300, 1, 0, -298, 0, 1, 0, 0]])  # hardly on the image
@example([["warp", 1 << 14, 1 << 14, 0.01, 0, 0, 0, 0.01, 0, 17, 0]])
@example([["warp", 300, 300, 1, 0, 0, 0, 1, 0, 99, 0]])
@example([["warp", 300, 300, 1, 0, 0, 0, 1, 0, 17, 99]])
@example([["crop", 0, 0, 300, 300]] * 10**5)
def test_a_forged_claim_makes_no_box_and_costs_the_trainer_no_time(claim):
    """Whatever the worker claims, an image that is not in the input is no crop of it."""
    verdict, spent = seconds_on_a_core(verified, PICTURE, Image.new("RGB", (300, 300)), claim)
    assert verdict == (None, "") and spent < 0.5, spent


@pytest.mark.parametrize("side, box", [(500, (0, 0, 64, 48)), (501, None)])
def test_the_trainer_does_not_work_without_bound_for_a_claim(side, box, monkeypatch):
    """Above the bound the claim is true, and nobody looks."""
    monkeypatch.setattr(sandbox_looks, "MOST_WORK", 500 * 500 + 64 * 500)
    small = picture(64, 48)
    shown = small.resize((side, side)).resize((64, 48))
    steps = [pil(64, 48, side, side), pil(side, side, 64, 48)]
    assert verified(small, shown, steps)[0] == box


# Red lines
A = "image.crop((100, 100, 300, 300))"
SAVED = f"{A}.save('c.png')"


@pytest.mark.parametrize("calls, last", [
    (["image.show()"], ["no_op"]),  # the whole image
    (["image.crop((0, 0, 800, 590)).show()"], ["no_op"]),  # 98 % of it
    (["image.crop((0, 0, 800, 560)).show()"], []),  # 93 % of it
    ([f"{A}.show()", f"{A}.show()"], ["no_op"]),
    ([f"{A}.show()", f"{A}.resize((400, 200)).show()"], []),  # twice as many pixels
    ([f"{A}.show()", f"{A}.resize((280, 280)).show()"], ["no_op"]),  # hardly
    ([f"{A}.resize((400, 400)).show()", f"{A}.show()"], ["no_op"]),
    ([f"{A}.show()", f"{A}.rotate(90).show()"], []),  # laid down in another way
    ([f"{A}.rotate(90).show()", f"{A}.rotate(90).resize((220, 220)).show()"], ["no_op"]),
    ([f"{A}.show()", f"ImageEnhance.Contrast({A}).enhance(2).show()"], []),
    ([f"ImageEnhance.Contrast({A}).enhance(2).show()"] * 2, ["no_op"]),
    ([f"{A}.show()", "image.crop((102, 100, 302, 300)).show()"], ["no_op"]),  # IoU 0.98
    ([f"{A}.show()", "image.crop((110, 100, 310, 300)).show()"], []),  # IoU 0.90
    ([f"{A}.show()", f"{A}.show(); image.crop((0, 0, 50, 50)).show()"], []),  # one is new
    ([f"{A}.rotate(9).show()", f"{A}.rotate(9).show()"], ["no_op"]),  # same bytes
    ([f"{A}.rotate(9).show()", f"{A}.rotate(8).show()"], []),
    (["print(1)", "print(1)"], []),
    ([f"{SAVED}; Image.open('c.png').show()"], []),  # a first look
    ([SAVED, "Image.open('c.png').show()"], ["io_scratch", "no_op"]),
    ([SAVED, "cv2.imshow('', cv2.imread('c.png'))"], ["io_scratch", "no_op"]),
    ([f"{A}.save('c.jpg')", "Image.open('c.jpg').show()"], ["io_scratch", "no_op"]),
    ([SAVED, "Image.open('c.png').resize((600, 600)).show()"], []),
    ([f"{SAVED}; Image.open('c.png').save('d.png')"], []),
    ([f"{A}.show()", f"{SAVED}; Image.open('c.png').save('d.png')"], ["io_scratch", "no_op"]),
    (["image.save('c.png'); Image.open('c.png').show()"], ["io_scratch", "no_op"]),
    ([f"{SAVED}; print(Image.open('c.png').size)"], []),
    ([SAVED, "Image.open('c.png').crop((0, 0, 50, 50)).show()"], []),
    ([SAVED, "Image.open('c.png').rotate(90).show()"], []),
    ([SAVED, "Image.open(open('c.png', 'rb')).show()"], ["io_scratch", "no_op"]),
    ([SAVED, "cv2.imshow('', cv2.imread('c.png', 0))"], []),  # it has been made gray
    (["Image.open('image.png').show()"], ["no_op"]),  # no scratch of its own
    (["try: image.crop((900, 0, 950, 50))\nexcept ValueError: pass"], ["invalid_coords"]),
    (["try: print(1/0)\nexcept ZeroDivisionError: print('handled')"], []),
])  # fmt: skip
def test_red_lines(box, calls, last):
    for code in calls:
        seen = box.run(code)
    assert seen.red_lines == last, seen


# Repairs and the scan
SNIPPETS = (
    "```python\n¦```¦~~~¦    ¦\t¦\n¦if x:\n¦print('a')¦“¦’¦x = 1¦!ls¦%matplotlib inline¦python\n"
    "¦<code>¦(¦'¦'''¦\r\n¦\ufeff¦\0¦\ud800"
)
CODE = (
    "image¦.crop(¦(0,0,9,9)¦.show()¦\n¦print(¦)¦[¦]¦1/0¦for x in y:¦lambda: ¦ = ¦np.¦'¦while 0: ¦"
    "import ¦os¦def f():¦  ¦return ¦yield ¦async ¦*¦del image¦exit()¦raise ¦class A: ¦@¦not ¦~¦:=¦"
    "...¦\0¦\ud800¦plt.show()¦f'{x!r}'"
)


def mixed(pieces: str):
    """Text of these pieces in any order."""
    return st.lists(st.sampled_from(pieces.split("¦")), max_size=14).map("".join)


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
@settings(max_examples=300)
@given(code=mixed(SNIPPETS) | st.text(max_size=40))
def test_repair_never_raises_and_leaves_code_that_parses_alone(code):
    fixed, told = repair(code)
    if parses(code):
        assert (fixed, told) == (code, [])
    else:
        assert (fixed == code and not told) or (parses(fixed) and told)
    assert all("\n" not in note for note in told)


def test_repair_takes_no_time_for_an_endless_line_of_new_lines():
    (code, _), spent = seconds_on_a_core(repair, "(" + "\n" * 50_000 + ")(")
    assert code.startswith("(") and spent < 2


HONEST = (
    "'''```python\nx\n```'''¦s = '“quoted”'¦x = '!pip'¦if 1:\n        y = 2¦text.replace('a', 'b')¦"
    "xs.remove(1)¦print('os.system')¦df.rename(columns={})¦# os.kill(1, 2)¦os.path.join('a')¦"
    "re.sub('a', 'b', 'c')¦d.pop('x')¦image.copy()¦shutil.copy('a', 'b')¦os.remove('a')¦"
    "p = Path('a')\np.unlink()¦shutil.rmtree('a')¦remove('a')¦os.fork¦sys.exit()¦"
    "os.rename('a', 'b')¦shutil.move('a', 'b')¦Path('a').replace('b')"
)


@pytest.mark.parametrize("code", HONEST.split("¦"))
def test_honest_code_is_neither_changed_nor_refused(code):
    assert repair(code) == (code, [])
    assert forbidden_call([*ast.walk(ast.parse(code))]) is None


@pytest.mark.parametrize("code, call", [
    ("import os as o\no.kill(1, 9)", "os.kill"),
    ("from os import popen as p\np('ls')", "os.popen"),
    ("from subprocess import run\nrun('ls')", "subprocess.run"),
    ("def f():\n    return [os.system('ls')]", "os.system"),
    ("os.execv('a', [])", "os.execv"),
    ("import posix\nposix.fork()", "posix.fork"),
])  # fmt: skip
def test_the_scan_names_what_it_refuses(shared, code, call):
    seen = shared.run("print('before')\n" + code)
    assert seen.blocked and call in seen.error and seen.text == "", seen


# Any code at all
@settings(QUICK, max_examples=100)
@given(code=mixed(CODE) | st.text(max_size=60))
@example("-" * 100_000 + "1")
@example("(" * 5000)
@example("[" * 90 + "]" * 90)
@example("x" + ".y" * 20_000)
@example("1" + "+1" * 20_000)
@example("'" * 99_999)
@example("if 1:\n " * 300)
@example("\\" * 999)
def test_any_text_is_survived(shared, code):
    seen = shared.run(code)
    assert isinstance(seen, Observation) and seen.environment is None and not seen.timed_out
    assert shared.run("print('next')").text == "next\n"


def test_the_file_of_the_input_costs_a_small_part_of_what_pillow_takes_for_it():
    """Pillow looks for the best filter of each row even where nothing is to be compressed."""
    large = picture(1600, 1200)
    ours = partial(png, np.asarray(large))
    theirs = partial(large.save, io.BytesIO(), "PNG", compress_level=0)
    ours, theirs = (min(seconds_on_a_core(way)[1] for _ in range(3)) for way in (ours, theirs))
    assert ours < theirs / 3, (ours, theirs)


@pytest.mark.parametrize("size", [
    (1, 1), (1, 70_000), (21_844, 1), (21_845, 1), (100, 655), (65_511, 3)
])  # fmt: skip
def test_the_file_of_the_input_is_exact_wherever_its_blocks_of_65535_bytes_end(size):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = b"".join(png(pixels))
    Image.open(io.BytesIO(file)).verify()  # its checksums
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(file))), pixels)
    assert np.array_equal(cv2.imdecode(np.frombuffer(file, np.uint8), 1)[..., ::-1], pixels)
