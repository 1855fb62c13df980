//! Programs behave under `jericho run` exactly as without Jericho. The same script runs in a plain directory and on the mount, and
//! must have the same output, status and files.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::program::{outcome, shell_in, under_run, within_limit};
use crate::volume::Volume;

/// Returns the names, kinds, modes, sizes, link targets and checksums of all files below a directory.
fn tree(dir: &Path) -> String {
    shell_in(
        dir,
        "find . -mindepth 1 -printf '%P %y %m %n %l ' \\( -type f -printf '%s\\n' -o -printf '\\n' \\) | LC_ALL=C sort
         find . -type f -print0 | LC_ALL=C sort -z | xargs -0 -r sha256sum",
    )
}

fn assert_same(what: &str, plain: &str, on_mount: &str) {
    if plain == on_mount {
        return;
    }
    let differing: Vec<String> = plain
        .lines()
        .zip(on_mount.lines())
        .filter(|(a, b)| a != b)
        .take(5)
        .map(|(a, b)| format!("  plain: {a}\n  here:  {b}"))
        .collect();
    panic!(
        "{what} under jericho run differs ({} against {} lines):\n{}",
        plain.lines().count(),
        on_mount.lines().count(),
        differing.join("\n")
    );
}

/// Runs a script. Returns its output and status.
fn run_script(mut command: Command, dir: &Path, script: &str) -> Output {
    command.args(["-e", "-c", script]).current_dir(dir);
    outcome(command.env("PYTHONHASHSEED", "0"))
}

/// The two directories in which scripts run: a plain one and one on the mount.
pub struct Pair {
    volume: Volume,
    plain: PathBuf,
    on_mount: PathBuf,
}

impl Pair {
    pub fn new(cache: &'static str) -> Pair {
        let volume = Volume::mounted("1G", 2, cache);
        let plain = volume.outside("plain");
        std::fs::create_dir(&plain).expect("mkdir");
        let on_mount = volume.make_dir("dir");
        let mut library = under_run("grep");
        library.args(["-q", "libjericho_preload", "/proc/self/maps"]);
        assert!(
            outcome(&mut library).status.success(),
            "jericho run starts programs without its preload library"
        );
        Pair {
            volume,
            plain,
            on_mount,
        }
    }

    /// Runs a script with `sh -e` in both directories, and asserts that output, status and files are the same.
    pub fn run(&self, script: &str) {
        let plain = run_script(within_limit("sh"), &self.plain, script);
        assert!(
            plain.status.success(),
            "without Jericho (127: not installed, see scripts/setup): {plain:?}"
        );
        let on_mount = run_script(under_run("sh"), &self.on_mount, script);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_same(
            "the standard error",
            &text(&plain.stderr),
            &text(&on_mount.stderr),
        );
        assert_same(
            "the standard output",
            &text(&plain.stdout),
            &text(&on_mount.stdout),
        );
        assert_eq!(plain.status, on_mount.status);
        assert_same(
            "the tree of files",
            &tree(&self.plain),
            &tree(&self.on_mount),
        );
    }

    /// Asserts that the files are the same after a remount.
    pub fn finish(self) {
        self.volume.remount();
        assert_same(
            "the tree of files after a remount",
            &tree(&self.plain),
            &tree(&self.on_mount),
        );
        self.volume.finish();
    }
}

/// Runs a script in both directories, and asserts that results are the same, also after a remount.
pub fn behaves_the_same(cache: &'static str, script: &str) {
    let pair = Pair::new(cache);
    pair.run(script);
    pair.finish();
}

/// Makes files to work on. They have the same content in both directories, so the script uses no randomness.
const FILES: &str = "
    mkdir -p tree/a/b
    for n in $(seq 300); do seq $n $((n * 20)) > tree/a/file$n; done
    seq 400000 > tree/a/b/long
    head -c 5000000 /dev/zero | tr '\\0' 'z' > tree/letters
    printf 'no newline at the end' > tree/short
    : > tree/empty
    truncate -s 3M tree/hole
";

#[test]
fn cp_and_cat_copy_the_same_bytes() {
    behaves_the_same(
        "16M",
        &format!(
            "{FILES}
             cp -r tree copied
             cp --sparse=always tree/hole sparse
             cp --reflink=never tree/a/b/long plain
             cat tree/a/file* tree/a/b/long > joined
             cat < joined | tee left > right
             cp tree/short tree/empty
             cp -l tree/a/file1 linked && echo more >> linked
             diff -r tree copied || true
             cmp left right && wc -c joined left right tree/a/b/long
             tail -n 3 joined; head -c 100 joined; tail -c +2000000 joined | head -c 50"
        ),
    );
}

#[test]
fn dd_copies_the_same_blocks_of_all_kinds() {
    behaves_the_same(
        "16M",
        &format!(
            "{FILES}
             export LC_ALL=C
             for bs in 1 511 4096 4097 65536 1M; do
                 dd if=tree/a/b/long of=dd-$bs bs=$bs count=3000 status=none
             done
             dd if=tree/a/b/long of=seek bs=1000 skip=7 seek=13 count=100 status=none
             dd if=tree/letters of=seek bs=4096 seek=3 count=1 conv=notrunc status=none
             dd if=tree/short of=seek oflag=append conv=notrunc status=none
             dd if=tree/a/b/long of=swapped conv=swab,ucase bs=8k status=none
             dd if=tree/a/b/long iflag=count_bytes,skip_bytes skip=100 count=70000 of=part status=none
             dd if=tree/hole of=holes conv=sparse bs=4k status=none
             dd if=tree/letters of=synced bs=64k count=20 conv=fsync status=none
             dd if=tree/letters bs=32k status=none | dd of=piped bs=10000 iflag=fullblock status=none
             exec 3<> both; dd of=/dev/stdout if=tree/short status=none >&3; echo after >&3; exec 3>&-; cat both
             cksum dd-* seek swapped part holes synced piped"
        ),
    );
}

#[test]
fn grep_sort_and_sed_find_the_same() {
    behaves_the_same(
        "8M",
        &format!(
            "{FILES}
             grep -rn '77$' tree | LC_ALL=C sort
             grep -rc 9 tree | LC_ALL=C sort | tail -n 40
             grep -rlE '^(12|3999)$' tree | LC_ALL=C sort
             LC_ALL=C sort -r tree/a/b/long -o sorted && head -n 5 sorted
             LC_ALL=C sort -S 1M -T . tree/a/file* | uniq -c | tail -n 5
             sed -i 's/9$/nine/' tree/a/file* && cat tree/a/file300 | tail -n 3
             awk '{{ sum += $1 }} END {{ print sum }}' tree/a/b/long
             find tree -size +100k -newer tree/a/file1 | LC_ALL=C sort
             tr -d '\\n' < tree/a/b/long | fold -w 60 | tail -n 2
             gzip -kn tree/a/b/long && gunzip -c tree/a/b/long.gz | cmp - tree/a/b/long"
        ),
    );
}

/// Uses ordinary, unbuffered, appending, vectored, mapped and shared descriptors, and prints what each sees of the others' writes.
const PYTHON: &str = r#"
import fcntl, hashlib, mmap, os, random, socket, subprocess, sys, tempfile, shutil

random.seed(7)
data = random.randbytes(3_000_000)

with open('f', 'wb') as f:
    for at in range(0, len(data), 7777):
        assert f.write(data[at:at + 7777]) == len(data[at:at + 7777])
    print('told', f.tell())
with open('f', 'r+b') as f:
    for _ in range(2000):
        at = random.randrange(len(data) + 5000)
        length = random.randrange(1, 9000)
        f.seek(at)
        if random.random() < 0.5:
            print('r', at, length, hashlib.md5(f.read(length)).hexdigest())
        else:
            print('w', at, f.write(random.randbytes(length)), f.tell())
    print(f.seek(0, 2), f.truncate(1_234_567), f.seek(0, 2))

# Duplicates of a descriptor, and children, share its offset.
fd = os.open('f', os.O_RDWR)
os.read(fd, 1000)
other = os.dup(fd)
print('dup', os.lseek(other, 0, os.SEEK_CUR), hashlib.md5(os.read(other, 50)).hexdigest(), os.lseek(fd, 0, os.SEEK_CUR))
child = os.fork()
if child == 0:
    os.read(fd, 333)
    os.write(fd, b'from the child')
    os._exit(0)
os.waitpid(child, 0)
print('fork', os.lseek(fd, 0, os.SEEK_CUR), os.pread(fd, 14, 1383))
said = subprocess.run(['head', '-c', '77'], stdin=fd, capture_output=True).stdout
print('spawn', hashlib.md5(said).hexdigest(), os.lseek(other, 0, os.SEEK_CUR) >= 1397 + 77)
os.lseek(fd, 0, os.SEEK_SET)
subprocess.run(['sh', '-c', 'echo from a shell; exec dd if=/dev/zero bs=100 count=3 status=none'], stdout=fd, check=True)
print('shell', os.lseek(other, 0, os.SEEK_CUR), os.pread(fd, 20, 0))

# A descriptor that the program sends itself through a socket shares the offset, too.
left, right = socket.socketpair()
socket.send_fds(left, [b'x'], [fd])
received = socket.recv_fds(right, 1, 1)[1][0]
os.read(received, 10)
print('sent', os.lseek(fd, 0, os.SEEK_CUR))

# Vectored calls, appends, reads at the end.
buffers = [bytearray(100), bytearray(5000), bytearray(3)]
print('readv', os.readv(fd, buffers), os.preadv(fd, buffers, 1_230_000), hashlib.md5(b''.join(buffers)).hexdigest())
print('writev', os.writev(fd, [b'a' * 5000, b'', b'b' * 3]), os.pwritev(fd, [b'c', b'd' * 9000], 4090))
a = os.open('f', os.O_WRONLY | os.O_APPEND)
print('append', os.write(a, b'end' * 2000), os.lseek(a, 0, os.SEEK_CUR), os.fstat(fd).st_size)
print('eof', os.pread(fd, 10, 10_000_000), os.read(fd, 0))
print('stat', os.stat('f').st_size, os.fstat(received).st_size, os.path.getsize('f'))

# Mapping and calls see each other's bytes.
with mmap.mmap(fd, 0) as m:
    m[100:107] = b'mapped!'
    print('mapped', os.pread(fd, 7, 100))
    os.pwrite(fd, b'called!', 200)
    print(m[200:207], m.find(b'called!'))
    m.flush()

# Calls fail with the same errors.
for what in [lambda: os.write(os.open('f', os.O_RDONLY), b'x'), lambda: os.read(a, 1), lambda: os.lseek(fd, -1, os.SEEK_SET),
             lambda: os.pread(fd, 1, -1), lambda: os.read(9999, 1), lambda: os.open('none', os.O_RDONLY),
             lambda: os.read(os.open('.', os.O_RDONLY), 1), lambda: os.open('f', os.O_CREAT | os.O_EXCL)]:
    try:
        what()
        print('no error')
    except OSError as e:
        print(e.errno)

# The kernel uses the number of a closed descriptor again for another file.
for n in range(200):
    one = os.open('f', os.O_RDONLY)
    os.pread(one, 1, 0)
    os.close(one)
    r, w = os.pipe()
    os.write(w, b'pipe%d' % n)
    assert os.read(r, 100) == b'pipe%d' % n
    os.close(r), os.close(w)
    with tempfile.TemporaryFile(dir='.') as t:
        t.write(b'%d' % n)
        t.seek(0)
        assert t.read() == b'%d' % n
os.dup2(a, fd)
try:
    os.read(fd, 1)
except OSError as e:
    print('dup2', e.errno)
fcntl.flock(received, fcntl.LOCK_EX)
fcntl.lockf(a, fcntl.LOCK_EX, 10, 0)
print(fcntl.fcntl(received, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR)

# Text files, copies, and removal of an open file.
with open('text', 'w', encoding='utf-8') as t:
    print('zeile äöü', file=t)
    subprocess.run(['sh', '-c', 'echo appended >> text'], check=True)
with open('text', 'a+') as t:
    t.write('more\n')
    t.seek(0)
    print(t.read().splitlines())
shutil.copyfile('f', 'g')
print(hashlib.sha256(open('g', 'rb').read()).hexdigest())
keep = open('g', 'rb')
os.unlink('g')
print(len(keep.read()))
with open('f', 'rb') as f, open('sent', 'wb') as s:
    print('sendfile', os.sendfile(s.fileno(), f.fileno(), 1000, 50_000), os.copy_file_range(f.fileno(), s.fileno(), 7000))
sys.stdout.flush()
os.dup2(os.open('stdout', os.O_WRONLY | os.O_CREAT, 0o600), 1)
print('this goes to the mount')
"#;

#[test]
fn python_reads_writes_maps_and_shares_descriptors_the_same() {
    let script = format!("cat > p.py <<'END'\n{PYTHON}\nEND\npython3 p.py");
    behaves_the_same("32M", &script);
}

#[test]
fn a_small_project_is_built_the_same() {
    behaves_the_same(
        "32M",
        r#"mkdir src
           for n in $(seq 20); do
               printf '#include "all.h"\nint part%d(int x) { return x * %d + (int)sizeof(struct s%d); }\n' $n $n $n > src/part$n.c
               printf 'struct s%d { char c[%d]; };\nint part%d(int);\n' $n $n $n >> src/all.h
           done
           { echo '#include <stdio.h>'; echo '#include "all.h"'; echo 'int main(void) { int x = 0;'
             for n in $(seq 20); do echo "x = part$n(x) % 10007;"; done
             echo 'printf("%d", x); return 0; }'; } > src/main.c
           cat > Makefile <<'END'
objects = $(patsubst src/%.c,build/%.o,$(wildcard src/*.c))
program: $(objects) libextra.a
	cc -o $@ $(objects) libextra.a
build/%.o: src/%.c src/all.h
	@mkdir -p build
	cc -O1 -Wall -c -o $@ $<
libextra.a: build/part1.o build/part2.o
	ar rcD $@ $^
END
           make -s -j2 2>&1
           ./program
           make -q && echo up to date
           rm build/part3.o && sed -i 's/x \* 3/x * 33/' src/part3.c && ! make -q && make -s 2>&1
           ./program
           strip -o stripped program && ./stripped"#,
    );
}
