"""
python tests/sandbox_pairs.py OLD NEW [rounds]       two checkouts, 20 rounds in turns

CPU milliseconds (user and system; of trainer, server and workers) that the sandboxes of two
checkouts take for the same work, and the median over rounds of new / old, with its quartiles.
"""

import json
import statistics
import subprocess
import sys

CHILD = """
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, os.getcwd())
import numpy as np
from PIL import Image
import sandbox
try:
    from kit import sandbox_server as home
except ImportError:  # in older checkouts, all is in one file
    home = sandbox
image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8))

def spent(boxes):
    pids = [home._server.process.pid, *(box.pid for box in boxes if box.socket)]
    files = [open(f"/proc/{pid}/schedstat") for pid in pids]
    return 1e3 * time.process_time() + sum(int(f.read().split()[0]) / 1e6 for f in files)

def measured(boxes, times, work):
    before = spent(boxes)
    work()
    return (spent(boxes) - before) / times

def calls(boxes, codes):
    with ThreadPoolExecutor(len(boxes)) as pool:
        list(pool.map(lambda box: [box.run(code) for code in codes], boxes))

save = [f"image.crop(({n}, 0, 200, 150)).save('c.png')" for n in range(8)]
show = [f"image.crop(({n}, 0, {n + 64}, 64)).show()" for n in range(20)]
sandbox.Sandbox(image).run("")
for _ in sys.stdin:
    boxes = [sandbox.Sandbox(image) for _ in range(16)]
    told = {"start": measured(boxes, 16, lambda: [box.protection for box in boxes])}
    told["no-op"] = measured(boxes, 40, lambda: calls(boxes[:1], [""] * 40))
    told["crop and save"] = measured(boxes, 8, lambda: calls(boxes[1:2], save))
    told["crop, 16 in parallel"] = measured(boxes, 320, lambda: calls(boxes, show))
    for box in boxes:
        box.close()
    print(json.dumps(told), flush=True)
"""

if __name__ == "__main__":
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", CHILD]
    sides = [subprocess.Popen(command, cwd=folder, **pipes) for folder in sys.argv[1:3]]
    rounds = []
    for n in range(1 + int([*sys.argv, 20][3])):
        told = [{}, {}]
        for side in (0, 1) if n % 2 else (1, 0):  # neither is always first
            print(file=sides[side].stdin, flush=True)
            told[side] = json.loads(sides[side].stdout.readline())
        rounds.append(told)
    for what in rounds[0][0]:
        pairs = [(old[what], new[what]) for old, new in rounds[1:]]  # the first warms up
        old, new = map(statistics.median, zip(*pairs))
        low, ratio, high = statistics.quantiles((b / a for a, b in pairs), n=4)
        print(f"{what:22} {old:6.2f} {new:6.2f}   {ratio:.2f} ({low:.2f} to {high:.2f})")
