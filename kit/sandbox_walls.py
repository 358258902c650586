"""
sandbox_walls.py: what the kernel refuses to a worker.

Concept     A worker puts up the walls around itself before it sees any code, and nothing takes them
            down again: seccomp refuses system calls, Landlock refuses paths, rlimits bound memory
            and files, and a tmpfs (a disk in memory) bounds all that is written.
Paper       nothing: CodeV's Appendix 13 asks for isolation, not for these walls
In          the limits, the worker's folder, its input image
Out         which walls stand
Left out    cgroups, an allow-list of system calls; anything but Linux on x86-64 and aarch64
Read next   sandbox_server.py (who calls `lock_in`), the head of sandbox.py (what is not contained)
"""

import ctypes
import errno
import fcntl
import os
import resource
import signal
import struct
import sys
import zlib
from contextlib import suppress

import numpy as np

WALLS = {"files", "calls", "rights", "sizes", "disk"}  # what `lock_in` can put up
MACHINE = os.uname().machine
libc = ctypes.CDLL(None, use_errno=True)

# Constants of Linux that Python does not have; the comment names the header, in linux/.
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # audit.h; machines with a table below
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38  # prctl.h
SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x80000000, 0x50000, 0x7FFF0000
SECCOMP_MODE_FILTER = 2  # seccomp.h, as the line above
X32_SYSCALL_BIT = 0x40000000  # unistd.h of x86-64: every call has a second number, with this bit
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16  # seccomp.h: offsets in struct seccomp_data
BPF_LOAD, BPF_AND, BPF_JEQ, BPF_JGE, BPF_RET = 0x20, 0x54, 0x15, 0x35, 0x06  # filter.h
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000  # sched.h
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000  # mount.h
CAPABILITY_VERSION_3, CAPABILITIES = 0x20080522, 64  # capability.h
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # unistd.h
LANDLOCK_CREATE_RULESET_VERSION = LANDLOCK_RULE_PATH_BENEATH = 1  # landlock.h
# landlock.h: rights to files, LANDLOCK_ACCESS_FS_...; then TCP; then abstract sockets and signals
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(1, 6))
MAKE_DIR, MAKE_REG, REFER, TRUNCATE = (1 << bit for bit in (7, 8, 13, 14))
BIND_TCP_AND_CONNECT_TCP, SCOPE_SOCKET_AND_SIGNAL = 0b11, 0b11
READ = READ_FILE | READ_DIR
WRITE = WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER | TRUNCATE

# System calls by name, with their numbers on x86-64 and on aarch64 (-1: it has none).
REFUSED = """fork 57 -1, vfork 58 -1, clone 56 220, execve 59 221, execveat 322 281, ptrace 101 117,
socket 41 198, socketpair 53 199, kill 62 129, tkill 200 130, tgkill 234 131,
rt_sigqueueinfo 129 138, kcmp 312 272, rt_tgsigqueueinfo 297 240, pidfd_open 434 434,
pidfd_send_signal 424 424, pidfd_getfd 438 438, process_vm_readv 310 270, process_vm_writev 311 271,
process_madvise 440 440, process_mrelease 448 448, setpriority 141 140, ioprio_set 251 30,
sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
sched_setattr 314 274, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39,
pivot_root 155 41, chroot 161 51, fsopen 430 430, fsmount 432 432, fsconfig 431 431, fspick 433 433,
open_tree 428 428, open_tree_attr 467 467, move_mount 429 429, mount_setattr 442 442, bpf 321 280,
perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, keyctl 250 219,
add_key 248 217, request_key 249 218, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190,
semop 65 193, semtimedop 220 192, semctl 66 191, msgget 68 186, msgsnd 69 189, msgrcv 70 188,
msgctl 71 187, mq_open 240 180, mq_unlink 241 181, memfd_create 319 279, memfd_secret 447 447,
open_by_handle_at 304 265, name_to_handle_at 303 264, fanotify_init 300 262, inotify_init 253 -1,
inotify_init1 294 26, personality 135 92, truncate 76 45, setxattr 188 5, lsetxattr 189 6,
fsetxattr 190 7, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
removexattrat 466 466, file_setattr 469 469, io_setup 206 0, sync 162 81, syncfs 306 267,
modify_ldt 154 -1"""
ABSENT = "clone3 435 435, openat2 437 437"  # the C library then falls back to clone and openat
# Landlock does not see these calls, and shutil.copy must not fail over them: they do nothing. With
# flock, a library's file would be a channel between sandboxes.
PRETENDED = """chmod 90 -1, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -1,
lchown 94 -1, fchown 93 55, fchownat 260 54, utime 132 -1, utimes 235 -1, futimesat 261 -1,
utimensat 280 88, flock 73 32"""
ALL_BITS = 0xFFFFFFFF
OPENS = os.O_ACCMODE | os.O_TRUNC  # opening a file only to read may empty it all the same
# A call, the place of one argument, the bits of it that count, and the values that they may "only"
# or may "not" have. Python's own I/O needs no more requests of fcntl and ioctl than these; others
# write, lock, or send signals.
FCNTLS = [fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC]
FCNTLS += [fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL]
# Of ioctls.h: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
IOCTLS = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]
FILTERED = [
    ("prctl 157 167", 0, ALL_BITS, "not", [PR_SET_PDEATHSIG]),
    ("prlimit64 302 261", 0, ALL_BITS, "only", [0]),  # 0: the process itself
    ("open 2 -1", 1, OPENS, "not", [os.O_TRUNC]),
    ("openat 257 56", 2, OPENS, "not", [os.O_TRUNC]),
    ("fcntl 72 25", 1, ALL_BITS, "only", FCNTLS),
    ("ioctl 16 29", 1, ALL_BITS, "only", IOCTLS),
]


def missing_walls() -> dict[str, str]:
    """What the system lacks of what a sandbox must have -> the wall that cannot stand without."""
    missing = {}
    if not landlock_abi():
        missing["Landlock (Linux 5.13 or newer, switched on)"] = "files"
    if MACHINE not in AUDIT_ARCH:
        missing[f"table of system calls for {MACHINE}"] = "calls"
    return missing


def lock_in(setup: dict, folder: str, pixels: np.ndarray, parent: int) -> dict[str, str]:
    """Put up the walls, in the one order that works. Returns each wall -> what stands there.

    setup: the limits, which "walls" to put up, the image's size ("shape"). pixels: [h, w, 3],
    uint8. parent: the pid of the server. Raises OSError if a wall does not go up."""
    stand = dict.fromkeys(sorted(WALLS), "none")
    written("/proc/self/oom_score_adj", "1000")  # when memory runs out, the trainer goes last
    large = room(setup["shape"])
    disk = setup["disk"] + 4 * large + (1 << 20)
    private = "disk" in setup["walls"] and private_disk(folder, disk)
    stand["disk"] = f"private tmpfs, {disk >> 20} MB" if private else "polled quota"
    os.mkdir(f"{folder}/work")
    with open(f"{folder}/image.png", "wb") as file:  # no metadata, and a name that says nothing
        file.writelines(png(pixels))
    os.symlink("../image.png", f"{folder}/work/image.png")  # where code looks; it may replace it
    if "sizes" in setup["walls"]:
        limit_sizes(setup["memory"], setup["file"] + large)
        stand["sizes"] = f"rlimits, {setup['memory'] >> 20} MB of memory"
    if "rights" in setup["walls"]:
        for capability in range(CAPABILITIES):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        check(libc.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)), "capset")
        stand["rights"] = "no capabilities"
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:  # the server died before it could take this worker with it
        os._exit(0)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if "files" in setup["walls"]:
        stand["files"] = landlock(folder)
    if "calls" in setup["walls"]:
        stand["calls"] = seccomp()
    return stand


def room(size: tuple[int, int]) -> int:
    """Bytes in a file with a picture as large as the input, which limits grow by: 4 channels. The
    disk holds the input's and three more."""
    return 4 * size[0] * size[1]


def png(pixels: np.ndarray) -> list[bytes | memoryview]:
    """The parts of an uncompressed PNG file of [h, w, 3], uint8. Pillow would look for the best
    filter of each row, in seconds for 8K, and zlib would copy the rows three times. Here each has
    filter 0, none."""
    h, w, _ = pixels.shape
    rows = np.zeros((h, 1 + 3 * w), np.uint8)
    rows[:, 1:] = pixels.reshape(h, 3 * w)
    stored, data = memoryview(rows.reshape(-1)), [b"\x78\x01"]
    for at in range(0, len(stored), most := 65_535):  # zlib's blocks that are not compressed
        block = stored[at : at + most]
        data += struct.pack("<BHH", at + most >= len(stored), len(block), most - len(block)), block
    data.append(struct.pack(">I", zlib.adler32(stored)))
    header, parts = struct.pack(">2I5B", w, h, 8, 2, 0, 0, 0), [b"\x89PNG\r\n\x1a\n"]
    for kind, body in (b"IHDR", [header]), (b"IDAT", data), (b"IEND", []):
        check = zlib.crc32(kind)
        for part in body:
            check = zlib.crc32(part, check)
        parts += struct.pack(">I", sum(map(len, body))), kind, *body, struct.pack(">I", check)
    return parts


def check(result: int, what: str) -> int:
    """The result of a C function. Raises OSError if it is negative."""
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def written(path: str, text: str) -> bool:
    """Write to a file of /proc; False if the system does not let us, as in some containers."""
    with suppress(OSError), open(path, "w") as file:
        return bool(file.write(text))
    return False


def private_disk(folder: str, size: int) -> bool:
    """Mount a tmpfs of `size` bytes that only this process sees and that vanishes with it. False
    if the system does not let us."""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS):  # an ordinary user may mount only in a user namespace
        names = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        mapped = (written(f"/proc/self/{name}", line) for name, line in names.items())
        if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER) or not all(mapped):
            return False
    options = f"size={size},nr_inodes=2000,mode=755".encode()
    private, safe = ctypes.c_ulong(MS_REC | MS_PRIVATE), MS_NOSUID | MS_NODEV | MS_NOEXEC
    if libc.mount(None, b"/", None, private, None):
        return False
    return not libc.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(safe), options)


def limit_sizes(memory: int, file: int) -> None:
    """Bound memory and each file, in bytes, and whatever else a process can pile up."""
    limits = {"AS": memory, "FSIZE": file, "NOFILE": 64, "CPU": 3600}
    for name, value in (limits | {"CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}).items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)  # nobody may go above this one
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def landlock_abi() -> int:
    """The version of Landlock that this kernel has; 0: none."""
    version = ctypes.c_uint(LANDLOCK_CREATE_RULESET_VERSION)
    return max(0, libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), version))


def landlock(folder: str) -> str:
    """From here on the kernel refuses all files but those of the system's libraries and of the
    folder, which may be read, and of work/ in the folder, which may be changed."""
    abi = landlock_abi()
    known = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1  # all rights that this one has
    ruleset = struct.pack("QQQ", known, BIND_TCP_AND_CONNECT_TCP, SCOPE_SOCKET_AND_SIGNAL)
    ruleset = ruleset[: 8 if abi < 4 else 16 if abi < 6 else 24]  # older ones take fewer fields
    size = ctypes.c_size_t(len(ruleset))
    rules = libc.syscall(LANDLOCK_CREATE_RULESET, ruleset, size, ctypes.c_uint(0))
    check(rules, "landlock_create_ruleset")
    system = "/usr /lib /lib64 /etc/ld.so.cache /etc/fonts /dev/null /dev/zero /dev/urandom".split()
    readable = [*system, sys.prefix, sys.base_prefix, *sys.path, folder]
    rights = {path: READ if os.path.isdir(path) else READ_FILE for path in readable}
    for path, allowed in (rights | {f"{folder}/work": READ | WRITE}).items():
        if os.path.exists(path):
            target = os.open(path, os.O_PATH)
            rule = struct.pack("=Qi", allowed & known, target)
            done = libc.syscall(LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, rule, 0)
            check(done, f"landlock_add_rule {path}")
            os.close(target)
    check(libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)
    return f"Landlock ABI {abi}"


def numbers(table: str) -> list[int]:
    """The numbers of a table that hold on this machine."""
    column = 1 + list(AUDIT_ARCH).index(MACHINE)
    return [n for row in table.split(",") if (n := int(row.split()[column])) >= 0]


def call_filter() -> bytes:
    """A program that refuses what one process with one thread and its own files does not need.

    Each line is an operation and its operand. A comparison also has how many lines to skip if it
    is true, and how many if it is false."""

    def line(operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", operation, if_true, if_false, operand)

    def refuse(error: int) -> bytes:
        return line(BPF_RET, SECCOMP_RET_ERRNO | error)

    program = line(BPF_LOAD, MACHINE_AT) + line(BPF_JEQ, AUDIT_ARCH[MACHINE], 1, 0)
    program += line(BPF_RET, SECCOMP_RET_KILL_PROCESS) + line(BPF_LOAD, NUMBER_AT)
    if MACHINE == "x86_64":
        program += line(BPF_JGE, X32_SYSCALL_BIT, 0, 1) + refuse(errno.ENOSYS)
    for table, error in (REFUSED, errno.EPERM), (ABSENT, errno.ENOSYS), (PRETENDED, 0):
        for number in numbers(table):
            program += line(BPF_JEQ, number, 0, 1) + refuse(error)
    allow, eperm = line(BPF_RET, SECCOMP_RET_ALLOW), refuse(errno.EPERM)
    for table, argument, bits, rule, values in FILTERED:
        listed, other = (eperm, allow) if rule == "not" else (allow, eperm)
        check = line(BPF_LOAD, ARGUMENTS_AT + 8 * argument) + line(BPF_AND, bits)
        check += b"".join(line(BPF_JEQ, value, 0, 1) + listed for value in values) + other
        for number in numbers(table):
            program += line(BPF_JEQ, number, 0, len(check) // len(allow)) + check
    return program + allow


FILTER = call_filter() if MACHINE in AUDIT_ARCH else b""  # made once, for all workers


def seccomp() -> str:
    """From here on the kernel runs FILTER before every system call."""
    program = ctypes.create_string_buffer(FILTER)
    length = len(FILTER) // struct.calcsize("HBBI")
    header = struct.pack("HxxxxxxQ", length, ctypes.addressof(program))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")
    return f"seccomp, {len(numbers(REFUSED))} calls refused"
