"""Runs one untrusted Python program in isolation: `python -I -S rewards/sandbox/child.py CONFIG_JSON`.

Started by `rewards.sandbox.run`.

Standard library only. Two levels: `namespaces` gives the program a PID, mount, network, IPC and UTS namespace of its
own and a root file system of read-only system folders; `filters` does without them and relies on Landlock. Both add
resource limits and a system-call filter without fork, sockets, tracing and mounting. When anything fails before the
program starts, the reason goes to standard error behind MARK and the exit status is SETUP_FAILED.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

MARK = "sandbox setup failed: "
SETUP_FAILED = 97

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_DUMPABLE = 1, 38, 22, 4

libc = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    """Raise OSError with errno when a libc call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source, target, kind, flags, data=None):
    """mount(2)."""
    encode = [None if value is None else value.encode() for value in (source, target, kind, data)]
    check(libc.mount(encode[0], encode[1], encode[2], ctypes.c_ulong(flags), encode[3]), f"mount {target}")


def bind_read_only(source, target):
    """Bind `source` to `target` and take away writing; flags that the host has locked are kept."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    mount(source, target, None, MS_BIND | MS_REC)
    host = os.statvfs(target).f_flag
    kept = sum(
        flag
        for bit, flag in ((os.ST_NOSUID, MS_NOSUID), (os.ST_NODEV, MS_NODEV), (os.ST_NOEXEC, MS_NOEXEC))
        if host & bit
    )
    mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)


def unshare_all():
    """New namespaces; through a user namespace, which needs no privilege, or directly where those are switched off."""
    rest = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(ctypes.c_int(CLONE_NEWUSER | rest)) == 0:
        with open("/proc/self/setgroups", "w") as file:
            file.write("deny")
        for name, outside in (("uid_map", uid), ("gid_map", gid)):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(f"1000 {outside} 1")
        return
    check(libc.unshare(ctypes.c_int(rest)), "unshare")


def build_root(config):
    """A root of read-only system folders, its own /proc, four devices and the writable /box; then pivot into it."""
    root = config["root"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for folder in config["folders"]:
        if os.path.islink(folder):
            os.makedirs(os.path.dirname(root + folder), exist_ok=True)
            os.symlink(os.readlink(folder), root + folder)
        elif os.path.exists(folder):
            bind_read_only(folder, root + folder)
    for device in ("null", "zero", "urandom"):
        bind_read_only(f"/dev/{device}", f"{root}/dev/{device}")
    os.makedirs(f"{root}/proc", exist_ok=True)
    with contextlib.suppress(OSError):  # containers that mask parts of /proc forbid a fresh one; few programs need it
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for folder in ("tmp", "etc", "home", "var"):  # empty and read-only: writing there is refused, not "not found"
        os.makedirs(f"{root}/{folder}", exist_ok=True)
    os.makedirs(f"{root}/box")
    mount("tmpfs", f"{root}/box", "tmpfs", MS_NOSUID | MS_NODEV, f"size={config['disk_mb']}m,mode=777")
    for name in os.listdir(config["files"]):
        with open(os.path.join(config["files"], name), "rb") as source, open(f"{root}/box/{name}", "wb") as target:
            target.write(source.read())
    os.makedirs(f"{root}/.old")
    check(libc.syscall(ctypes.c_long(SYSCALLS["pivot_root"]), root.encode(), f"{root}/.old".encode()), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/.old", MNT_DETACH), "umount")
    os.rmdir("/.old")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/box")


def limits(config):
    """Resource limits; hard and soft alike, so that the program cannot raise them."""
    pairs = {
        resource.RLIMIT_CPU: config["cpu_s"],
        resource.RLIMIT_AS: config["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: config["disk_mb"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: 32 << 20,
    }
    if config["level"] == "namespaces":  # elsewhere the user's other processes would count too
        pairs[resource.RLIMIT_NPROC] = 64
    for kind, value in pairs.items():
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NUMBERS = {  # name: (x86_64, aarch64); None where the architecture has no such call
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198),
    "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "ptrace": (101, 117), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
    "reboot": (169, 142), "swapon": (167, 224), "open_by_handle_at": (304, 265), "setsid": (112, 157),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "prlimit64": (302, 261),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
ARCHITECTURE, COLUMN = MACHINES.get(platform.machine(), (0, 0))
SYSCALLS = {name: numbers[COLUMN] for name, numbers in _NUMBERS.items() if numbers[COLUMN] is not None}
_OWN_ONLY = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_FREE = ("clone", "clone3", "prlimit64", *_OWN_ONLY)


def seccomp():
    """Refuse (EPERM) what a program under test has no business with; threads stay possible, processes do not."""
    if not ARCHITECTURE:
        raise OSError(f"no system-call filter for {platform.machine()}")
    allow, deny, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    load, jump_equal, jump_set, give = 0x20, 0x15, 0x45, 0x06
    code = [(load, 0, 0, 4), (jump_equal, 1, 0, ARCHITECTURE), (give, 0, 0, kill), (load, 0, 0, 0)]
    if COLUMN == 0:  # the x32 calls share the architecture and have bit 30 set
        code += [(jump_set, 0, 1, 0x40000000), (give, 0, 0, deny)]
    for name, number in SYSCALLS.items():
        if name not in _FREE:
            code += [(jump_equal, 0, 1, number), (give, 0, 0, deny)]
    # clone3 hides its flags in memory: "no such call" makes the C library use clone, whose flags can be seen.
    code += [(jump_equal, 0, 1, SYSCALLS["clone3"]), (give, 0, 0, absent)]

    def only_if(name, kind, value):
        """Allow `name` when its first argument passes, refuse it otherwise."""
        first = (load, 0, 0, 16)
        return [(jump_equal, 0, 4, SYSCALLS[name]), first, (kind, 0, 1, value), (give, 0, 0, allow), (give, 0, 0, deny)]

    code += only_if("clone", jump_set, 0x00010000)  # threads
    for name in _OWN_ONLY:
        code += only_if(name, jump_equal, os.getpid())
    code += only_if("prlimit64", jump_equal, 0)
    code += [(give, 0, 0, allow)]
    program = b"".join(struct.pack("HBBI", *step) for step in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_SET_SECCOMP, 2, head, 0, 0), "seccomp")


def landlock(config):
    """Reading and executing below the system folders, everything below the box, nothing elsewhere."""
    access_all, read_only = (1 << 13) - 1, (1 << 0) | (1 << 2) | (1 << 3)
    attribute = struct.pack("Q", access_all)
    ruleset = check(libc.syscall(ctypes.c_long(444), attribute, ctypes.c_size_t(len(attribute)), 0), "Landlock")
    rules = [(folder, read_only) for folder in (*config["folders"], "/dev/urandom", "/dev/null", "/dev/zero")]
    rules.append((config["files"], access_all))
    for path, access in rules:
        if not os.path.exists(path):
            continue
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = access if os.path.isdir(path) else access & 0b111
        rule = struct.pack("=Qi", allowed, handle)
        check(libc.syscall(ctypes.c_long(445), ruleset, 1, rule, 0), f"Landlock rule for {path}")
        os.close(handle)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.syscall(ctypes.c_long(446), ruleset, 0), "Landlock restrict")
    os.close(ruleset)
    os.chdir(config["files"])


def become_program(config):
    """Last steps in the process that turns into the program."""
    limits(config)
    seccomp()
    os.closerange(3, 256)
    environment = {"PATH": "/usr/bin:/bin", "HOME": ".", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    os.execve(config["python"], [config["python"], "-I", "-S", "-B", "main.py"], environment)


def main():
    """Isolate, then run; in `namespaces` this process stays behind and passes the exit status on."""
    config = json.loads(sys.argv[1])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != config["parent"]:
        os._exit(SETUP_FAILED)
    try:
        if config["level"] == "filters":
            landlock(config)
            become_program(config)
        unshare_all()
    except OSError as error:
        sys.stderr.write(f"{MARK}{error}")
        os._exit(SETUP_FAILED)
    child = os.fork()
    if child == 0:
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            build_root(config)
            become_program(config)
        except OSError as error:
            sys.stderr.write(f"{MARK}{error}")
            sys.stderr.flush()
        os._exit(SETUP_FAILED)
    os.closerange(0, 2)
    status = os.waitpid(child, 0)[1]
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


if __name__ == "__main__":
    main()
