"""
sandbox_stand_ins.py: Pillow, OpenCV and matplotlib, kinder than they are.

Concept     A policy that invents a path or a box off the image is told so and gets what it meant.
            The same stand-ins notice what is shown, and how a crop came from the input.
Paper       nothing: CodeV's Appendix 13 names the repairs, not the functions
In          a worker
Out         functions to put in place of open, crop, resize, save, show, imread, imwrite, savefig
Left out    every other library; trust: code may call the true functions, and forge what is noted
Read next   sandbox_worker.py (who uses them), sandbox.verified_box (who checks the notes)
"""

import hashlib
import os
import re
import sys

from PIL import Image


THIN, SMALL, LARGE = 100, 28, 2048      # sides: ratio (ours), least (Qwen2.5-VL), most (ours)

STEPS = "crops and resizes"             # a key of Image.info, which Pillow hands on to its results
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
INVENTED = re.compile(r"(path[_ ]?to|the|your|my|input|original|source|test|user|uploaded|sample)?"
                      r"[_ -]?(image|img|photo|picture|input)[_ -]?(file|path|\d)?", re.I)


def digest(image: Image.Image) -> bytes:
    return hashlib.blake2b(repr(image.size).encode() + image.tobytes()).digest()


def flat(image: Image.Image) -> Image.Image:
    """A copy in RGB, with white behind whatever is transparent."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image, info = image.convert("RGBA"), image.info
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image.info = info
    return image.convert("RGB")


pillow_open = Image.open


def stand_ins(w) -> list[tuple[object, str, object]]:
    """(owner, name, function): they repair paths and boxes, and notice what is shown."""
    kinder = []

    def instead_of(owner, *names):
        def register(function):
            for name in names:
                old = getattr(owner, name)
                kinder.append((owner, name, lambda *args, _old=old, **named: function(
                    _old, *args, **named)))
        return register

    @instead_of(Image, "open")
    def _(old, file, *rest, **options):
        path = w.to_read(file)
        image = old(path, *rest, **options)
        if w.is_own(path):
            w.reloaded.add(digest(flat(image)))
        elif str(path) == w.path:
            image.info[STEPS] = []
        return image

    @instead_of(Image.Image, "crop")
    def _(old, image, box=None):
        box = (0, 0, *image.size) if box is None else w.fit(box, *image.size)
        return w.step(image, old(image, box), *box)

    @instead_of(Image.Image, "resize")
    def _(old, image, size, resample=None, box=None, reducing_gap=None):
        result = old(image, size, resample, box, reducing_gap)
        corners = (float(v) for v in box or (0, 0, *image.size))
        return w.step(image, result, *corners, *result.size, resample, reducing_gap)

    @instead_of(Image.Image, "thumbnail")       # it resizes a hidden copy
    def _(old, image, *rest, **options):
        before = image.size
        old(image, *rest, **options)
        if image.size != before and STEPS in image.info:
            image.info[STEPS] = w.latest

    @instead_of(Image.Image, "save")
    def _(old, image, file, format=None, **options):
        path = w.to_write(file, ".png")
        kind = (format or os.path.splitext(str(path))[1].lstrip(".")).upper()
        if kind in ("JPG", "JPEG"):
            format = "JPEG"
            if image.mode not in ("RGB", "L", "CMYK"):
                w.note(f"{image.mode} turned into RGB for JPEG")
                image = flat(image)
        old(image, path, format, **options)
        if isinstance(path, str):
            w.show(image, "file", path)

    instead_of(Image.Image, "show")(lambda old, image, *_, **__: w.show(image, "show"))
    instead_of(Image, "fromarray")(
        lambda old, array, *rest, **named: w.with_origin(old(array, *rest, **named), array))

    if cv2 := sys.modules.get("cv2"):
        @instead_of(cv2, "imread")
        def _(old, file, *rest):
            path = w.to_read(file)
            pixels = old(path, *rest)
            if pixels is None:
                w.note(f"cv2.imread found no image at {str(path)[-80:]}")
            elif w.is_own(path):
                w.reloaded.add(digest(flat(w.from_array(pixels))))
            return pixels

        @instead_of(cv2, "imwrite")
        def _(old, file, pixels, *rest):
            path = w.to_write(file, ".png")
            done = old(path, pixels, *rest)
            w.show(w.from_array(pixels), "file", path)
            return done

        instead_of(cv2, "imshow")(lambda old, _, pixels: w.show(w.from_array(pixels), "show"))
        instead_of(cv2, "waitKey", "waitKeyEx")(lambda *_, **__: -1)
        instead_of(cv2, "namedWindow", "resizeWindow", "moveWindow", "destroyWindow",
                   "destroyAllWindows")(lambda *_, **__: None)

    if plt := sys.modules.get("matplotlib.pyplot"):
        @instead_of(plt, "show")
        def _(old, *_, **__):
            if not any(plt.figure(number).axes for number in plt.get_fignums()):
                w.note("plt.show(): no figure")
            w.show_figures()

        @instead_of(plt.Figure, "savefig")
        def _(old, figure, file, *rest, **options):
            path = w.to_write(file, ".png")
            old(figure, path, *rest, **options)
            w.drawn.add(figure)
            if path in w.shown:                 # matplotlib saves through Pillow
                w.shown[path] = (*w.shown[path][:2], "figure")

    return kinder
