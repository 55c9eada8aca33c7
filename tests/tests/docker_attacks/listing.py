"""Prints everything that a sandbox keeps, one fact per line, in a form that is equal in equal sandboxes."""

import fcntl
import os
import stat
import struct
import time

ROOTS = ["/testbed", "/tmp", "/dev", "/dev/shm", "/dev/mqueue", "/dev/pts", "/var/tmp", "/run", "/root", "/"]
DEEP = {"/testbed", "/tmp", "/dev", "/var/tmp", "/run", "/root"}


def attempt(call, *args):
    try:
        return call(*args)
    except OSError as error:
        return "errno %d" % error.errno


def attributes(path):
    names = attempt(lambda: os.listxattr(path, follow_symlinks=False))
    names = names if isinstance(names, list) else [names]
    known = ["system.posix_acl_default", "system.posix_acl_access"]
    values = {}
    for name in sorted(set(names + known)):
        value = attempt(lambda: os.getxattr(path, name, follow_symlinks=False))
        if isinstance(value, bytes):
            values[name] = value.hex()
    return values


def flags(path):
    def get(request, size):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return fcntl.ioctl(handle, request, bytes(size)).hex()
        finally:
            os.close(handle)

    return attempt(get, 0x80086601, 8), attempt(get, 0x801C581F, 28)


def show(path, is_root):
    about = os.lstat(path)
    target = os.readlink(path) if stat.S_ISLNK(about.st_mode) else ""
    size = about.st_size if stat.S_ISREG(about.st_mode) else 0
    print("path", ascii(path), oct(about.st_mode), about.st_uid, about.st_gid, about.st_rdev, size, ascii(target), attributes(path))
    if is_root:
        for name, value in (("mtime", about.st_mtime), ("atime", about.st_atime)):
            recent = time.time() - 86400 < value < time.time() + 5
            print("time", path, name, "recent" if recent else value)
        print("flags", path, flags(path))
        space = os.statvfs(path)
        if path in ("/testbed", "/tmp", "/dev/shm"):
            print("space", path, space.f_blocks - space.f_bfree, space.f_files - space.f_ffree, space.f_blocks)


def walk(folder):
    for entry in sorted(attempt(os.listdir, folder) or []):
        path = os.path.join(folder, entry)
        show(path, False)
        if os.path.isdir(path) and not os.path.islink(path) and path not in ROOTS:
            walk(path)


for root in ROOTS:
    if os.path.isdir(root):
        show(root, True)
        if root in DEEP:
            walk(root)

for line in open("/proc/self/mountinfo"):
    front, back = line.rstrip("\n").split(" - ")
    point, options = front.split(" ")[4:6]
    kind, _, more = back.split(" ", 2)
    more = "" if kind in ("overlay", "cgroup", "cgroup2") else more
    print("mount", point, options, kind, more)
for line in open("/proc/self/limits"):
    print("limit", line.rstrip())
for line in open("/proc/self/status"):
    if line.startswith(("Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed_list", "Mems_allowed_list", "Sig", "Umask", "Groups", "Uid", "Gid", "Shd")):
        print("status", line.split() if not line.startswith("SigQ") else line.split("/")[-1].strip())
for name in ("oom_score_adj", "oom_adj", "timerslack_ns", "personality", "setgroups", "uid_map", "coredump_filter"):
    print("process", name, attempt(lambda: open("/proc/self/" + name).read().split()))
print("nice", os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0)))
for name in ("shm", "sem", "msg"):
    print("ipc", name, attempt(lambda: open("/proc/sysvipc/" + name).read().split("\n")[1:]))
print("keys", attempt(lambda: [line for line in open("/proc/keys") if "solution" in line]))
# Locks of open file descriptions carry no process (-1), so the kernel lists those of every container.
print("locks", attempt(lambda: sum(line.split(" -> ")[-1].split()[-4] != "-1" for line in open("/proc/locks"))))
print("processes", sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())))
print("environment", sorted((key, value) for key, value in os.environ.items() if key != "HOSTNAME"))
print("descriptors", sorted(os.listdir("/proc/self/fd"))[:8])
try:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    handles = [libc.inotify_init() for _ in range(16)]
    print("watches", all(handle >= 0 for handle in handles))
    print("io priority", libc.syscall(251 + 1, 1, 0))
except ImportError:
    pass
