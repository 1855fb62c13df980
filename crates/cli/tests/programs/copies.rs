//! copy_file_range within the mount: by the daemon, across slices, with holes.

use crate::program::{run_in, shell_in};
use crate::same::behaves_the_same;
use crate::volume::Volume;

/// Copies at random, and in edge cases. Prints the result of each call.
const RANDOM: &str = r#"
import errno, hashlib, os, random
random.seed(11)
names = ['a', 'b', 'dir/c']
os.mkdir('dir')
files = [os.open(name, os.O_RDWR | os.O_CREAT) for name in names]
for fd in files:
    os.write(fd, random.randbytes(random.randrange(300_000)))
    os.ftruncate(fd, 500_000)
    os.pwrite(fd, random.randbytes(5000), 700_000)
for n in range(400):
    a, b = random.randrange(3), random.randrange(3)
    at, to, length = random.randrange(900_000), random.randrange(900_000), random.randrange(1, 200_000)
    try:
        said = os.copy_file_range(files[a], files[b], length, at, to)
    except OSError as e:
        said = errno.errorcode[e.errno]
    if n % 50 == 49:
        os.ftruncate(files[b], random.randrange(800_000))
    print(n, a, b, said, [os.fstat(fd).st_size for fd in files])
    if n % 10 == 0:
        print([hashlib.md5(os.pread(fd, 2_000_000, 0)).hexdigest() for fd in files])

def result(call):
    try:
        return call()
    except OSError as e:
        return errno.errorcode[e.errno]

append = os.open('a', os.O_WRONLY | os.O_APPEND)
only = os.open('a', os.O_RDONLY)
print(result(lambda: os.copy_file_range(files[1], append, 100, 0, 0)))
print(result(lambda: os.copy_file_range(files[1], only, 100, 0, 0)))
print(result(lambda: os.copy_file_range(files[0], files[0], 1000, 0, 999)))
print(result(lambda: os.copy_file_range(files[0], files[0], 1000, 0, 1000)))
print(result(lambda: os.copy_file_range(files[0], files[1], 100, 10_000_000, 0)))
print(result(lambda: os.copy_file_range(files[0], files[1], 0, 0, 0)))
"#;

#[test]
fn copies_within_a_file_and_between_files_return_and_do_the_same() {
    let script = format!("cat > p.py <<'END'\n{RANDOM}\nEND\npython3 p.py");
    behaves_the_same("32M", &script);
}

/// Copies from the end of a file that grows, without asking for its size.
const GROWING: &str = r#"
import os
f = os.open('f', os.O_RDWR | os.O_CREAT | os.O_APPEND)
g = os.open('g', os.O_RDWR | os.O_CREAT)
r, w = os.pipe()
for n in range(400):
    os.write(f, bytes([n % 251]) * 1000)
    if n % 20 == 19:
        at = n * 1000
        print(n, os.copy_file_range(f, g, 1000, at, 0), os.pread(g, 1000, 0) == bytes([n % 251]) * 1000)
        os.write(f, bytes([n % 251]) * 1000)
        print(os.sendfile(g, f, at + 1000, 1000))
        os.write(f, bytes([n % 251]) * 1000)
        print(os.splice(f, w, 1000, offset_src=at + 2000), len(os.read(r, 1000)))
"#;

#[test]
fn copies_from_a_file_that_a_program_makes_longer_reach_its_end() {
    let script = format!("cat > p.py <<'END'\n{GROWING}\nEND\npython3 p.py");
    behaves_the_same("32M", &script);
}

/// Copies a whole file, as cp does.
const WHOLE: &str = "
import os, sys
a, b = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
while os.copy_file_range(a, b, 1 << 40):
    pass
";

#[test]
fn holes_are_copied_as_holes_and_across_slices() {
    let volume = Volume::mounted("512M", 2, "16M");
    let dirs = [volume.make_dir("one"), volume.make_dir("two")];
    let slices: Vec<_> = dirs
        .iter()
        .map(|dir| volume.where_is(dir)["slice"].clone())
        .collect();
    assert_ne!(
        slices[0], slices[1],
        "directories of the root alternate between the slices"
    );
    shell_in(
        &volume.mnt(),
        "truncate -s 200M one/a
         for at in 0 1000 40001; do seq 400000 | dd of=one/a bs=4k seek=$at conv=notrunc status=none; done
         yes | head -c 4000000 > two/a",
    );
    run_in(&volume.mnt(), "python3", &["-c", WHOLE, "one/a", "two/a"]);
    shell_in(
        &volume.mnt(),
        "test $(stat -c %s two/a) = 209715200
         test $(stat -c %b two/a) -lt 30000
         cmp one/a two/a",
    );
    volume.remount();
    shell_in(&volume.mnt(), "cmp one/a two/a");
    volume.finish();
}

#[test]
fn a_copy_within_the_mount_leaves_the_page_cache_and_inline_writers_alone() {
    let volume = Volume::mounted("256M", 2, "16M");
    let script = "
import os
a, b = (os.open(name, os.O_RDWR | os.O_CREAT) for name in ('a', 'b'))
for n in range(200):
    data = bytes([n + 1]) * 20_000
    os.pwrite(a, data, 0)
    os.pwrite(b, data, 30_000)
    assert os.copy_file_range(a, b, 20_000, 0, 5_000) == 20_000
    assert os.pread(b, 60_000, 5_000) == data + bytes(5_000) + data
";
    let mut program = crate::program::under_run("python3");
    program.args(["-c", script]).current_dir(volume.mnt());
    crate::program::succeed(&mut program);
    let stat = volume.stat();
    assert!(stat["writes_granted"].as_u64() >= Some(2), "{stat}");
    assert_eq!(stat["writes_withheld"], 0);
    volume.finish();
}

/// Copies to mapped files, and asserts that reads and the mapping both show the copied bytes.
const MAPPED: &str = r#"
import mmap, os, random
random.seed(12)
SIZE = 300_000
files = [os.open(name, os.O_RDWR | os.O_CREAT) for name in ('a', 'b')]
holds = [bytearray(random.randbytes(SIZE)) for fd in files]
for fd, bytes in zip(files, holds):
    os.pwrite(fd, bytes, 0)
maps = [mmap.mmap(fd, SIZE) for fd in files]
assert all(m[:] == bytes for m, bytes in zip(maps, holds))
for n in range(300):
    a, b = random.randrange(2), random.randrange(2)
    length = random.choice([1, 100, 4096, 10_000, 70_000])
    at, to = (random.randrange(SIZE - length) // step * step for step in random.choices([1, 4096], k=2))
    if a == b and abs(at - to) < length:
        continue
    stored = random.randrange(SIZE)
    maps[b][stored] = holds[b][stored] = n % 256
    holds[b][to:to + length] = holds[a][at:at + length]
    done = 0
    while done < length:
        now = os.copy_file_range(files[a], files[b], length - done, at + done, to + done)
        assert now > 0
        done += now
    assert maps[b][:] == holds[b], n
    assert os.pread(files[b], SIZE, 0) == holds[b], n
print('copied')
"#;

#[test]
fn copies_to_a_file_that_is_mapped_are_whole() {
    let volume = Volume::mounted("256M", 2, "32M");
    assert_eq!(
        run_in(&volume.mnt(), "python3", &["-c", MAPPED]),
        "copied\n"
    );
    volume.finish();
}
