//! Directories, links, renames, special files.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use rustix::fs::{AtFlags, CWD, FileType, Mode, RenameFlags};
use rustix::io::Errno;

use super::support::Volume;

#[test]
fn rename_replaces_refuses_or_exchanges_as_asked() {
    let v = Volume::mounted();
    let (a, b) = (v.at("a"), v.at("b"));
    fs::write(&a, b"A").unwrap();
    fs::write(&b, b"B").unwrap();
    let rename = |flags| rustix::fs::renameat_with(CWD, &a, CWD, &b, flags);
    assert_eq!(rename(RenameFlags::NOREPLACE), Err(Errno::EXIST));
    rename(RenameFlags::EXCHANGE).unwrap();
    assert_eq!(
        (fs::read(&a).unwrap(), fs::read(&b).unwrap()),
        (b"B".to_vec(), b"A".to_vec())
    );
    rename(RenameFlags::empty()).unwrap();
    assert!(!a.exists());
    assert_eq!(fs::read(&b).unwrap(), b"B");
    assert_eq!(rename(RenameFlags::EXCHANGE), Err(Errno::NOENT));
}

#[test]
fn rename_of_directories_follows_the_rules() {
    let v = Volume::mounted();
    fs::create_dir_all(v.at("d/e")).unwrap();
    fs::create_dir(v.at("full")).unwrap();
    fs::write(v.at("full/x"), b"x").unwrap();
    fs::create_dir(v.at("empty")).unwrap();
    let errno = |r: std::io::Result<()>| r.unwrap_err().raw_os_error().unwrap();
    assert_eq!(errno(fs::rename(v.at("d"), v.at("d/e/f"))), libc::EINVAL);
    assert_eq!(errno(fs::rename(v.at("d"), v.at("full"))), libc::ENOTEMPTY);
    fs::rename(v.at("d"), v.at("empty")).unwrap();
    assert!(v.at("empty/e").is_dir() && !v.at("d").exists());
    assert_eq!(errno(fs::remove_dir(v.at("full"))), libc::ENOTEMPTY);
    // A moved directory counts in its new parent.
    fs::rename(v.at("empty/e"), v.at("e")).unwrap();
    assert_eq!(fs::metadata(v.at("empty")).unwrap().nlink(), 2);
    assert_eq!(fs::metadata(v.mnt()).unwrap().nlink(), 2 + 3);
}

#[test]
fn a_file_without_a_name_gets_a_name_or_is_removed() {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    let v = Volume::mounted();
    let unnamed = || {
        File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE)
            .mode(0o640)
            .open(v.mnt())
    };
    let mut file = unnamed().unwrap();
    file.write_all(b"at last").unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    assert_eq!(fs::read_dir(v.mnt()).unwrap().count(), 0);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, path, CWD, v.at("named"), AtFlags::SYMLINK_FOLLOW).unwrap();
    drop(file);
    drop(unnamed().unwrap());
    v.remount();
    assert_eq!(fs::read(v.at("named")).unwrap(), b"at last");
    let metadata = fs::metadata(v.at("named")).unwrap();
    assert_eq!((metadata.nlink(), metadata.mode() & 0o7777), (1, 0o640));
    v.umount();
    v.check();
}

#[test]
fn a_file_without_a_name_lives_until_it_is_closed() {
    let v = Volume::mounted();
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(v.at("f"))
        .unwrap();
    file.write_all(b"still here").unwrap();
    fs::remove_file(v.at("f")).unwrap();
    assert!(!v.at("f").exists());
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "still here");
    file.write_all(b", growing").unwrap();
    assert_eq!(file.metadata().unwrap().len(), 19);
    drop(file);
    v.umount();
    v.check();
}

#[test]
fn hard_links_share_one_file_and_count() {
    let v = Volume::mounted();
    fs::write(v.at("a"), b"one").unwrap();
    fs::hard_link(v.at("a"), v.at("b")).unwrap();
    let (a, b) = (
        fs::metadata(v.at("a")).unwrap(),
        fs::metadata(v.at("b")).unwrap(),
    );
    assert_eq!((a.ino(), a.nlink(), b.nlink()), (b.ino(), 2, 2));
    fs::write(v.at("b"), b"two").unwrap();
    assert_eq!(fs::read(v.at("a")).unwrap(), b"two");
    fs::remove_file(v.at("a")).unwrap();
    assert_eq!(fs::metadata(v.at("b")).unwrap().nlink(), 1);
    v.remount();
    assert_eq!(fs::read(v.at("b")).unwrap(), b"two");
}

#[test]
fn symbolic_links_keep_their_target() {
    let v = Volume::mounted();
    fs::create_dir(v.at("dir")).unwrap();
    fs::write(v.at("dir/file"), b"through").unwrap();
    std::os::unix::fs::symlink("dir", v.at("link")).unwrap();
    std::os::unix::fs::symlink("x".repeat(4000), v.at("long")).unwrap();
    assert_eq!(fs::read(v.at("link/file")).unwrap(), b"through");
    v.remount();
    assert_eq!(fs::read_link(v.at("link")).unwrap().to_str(), Some("dir"));
    assert_eq!(fs::read_link(v.at("long")).unwrap().as_os_str().len(), 4000);
    assert_eq!(fs::symlink_metadata(v.at("link")).unwrap().len(), 3);
}

#[test]
fn special_files_keep_their_kind_and_numbers() {
    let v = Volume::mounted();
    let make = |name: &str, kind, dev| {
        rustix::fs::mknodat(CWD, v.at(name), kind, Mode::from_raw_mode(0o600), dev).unwrap();
    };
    make("fifo", FileType::Fifo, 0);
    make("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    make(
        "block",
        FileType::BlockDevice,
        rustix::fs::makedev(259, 70_000),
    );
    let socket = std::os::unix::net::UnixListener::bind(v.at("socket")).unwrap();
    drop(socket);
    v.remount();
    let of = |name: &str| fs::symlink_metadata(v.at(name)).unwrap();
    assert!(of("fifo").file_type().is_fifo());
    assert!(of("socket").file_type().is_socket());
    assert!(of("null").file_type().is_char_device());
    assert_eq!(of("null").rdev(), rustix::fs::makedev(1, 3));
    assert_eq!(of("block").rdev(), rustix::fs::makedev(259, 70_000));
    fs::write(v.at("null"), b"swallowed").expect("a device file made by root works");
}

#[test]
fn names_of_255_bytes_work_and_longer_ones_do_not() {
    let v = Volume::mounted();
    fs::write(v.at(&"n".repeat(255)), b"x").unwrap();
    let error = fs::write(v.at(&"n".repeat(256)), b"x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
}

#[test]
fn a_name_that_was_looked_for_in_vain_is_found_once_it_is_there() {
    let v = Volume::mounted();
    assert!(!v.at("late").exists());
    fs::write(v.at("late"), b"x").unwrap();
    assert!(v.at("late").exists());
    fs::rename(v.at("late"), v.at("later")).unwrap();
    assert!(!v.at("late").exists() && v.at("later").exists());
    rustix::fs::unlinkat(CWD, v.at("later"), AtFlags::empty()).unwrap();
    assert!(!v.at("later").exists());
}

/// Returns the names in a directory, in order.
fn listed(dir: &std::path::Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<String> = entries
        .map(|entry| name(entry).into_string().unwrap())
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn a_listing_shows_each_change_since_the_one_before() {
    let v = Volume::mounted();
    let (dir, other) = (v.at("dir"), v.at("other"));
    fs::create_dir(&dir).unwrap();
    fs::create_dir(&other).unwrap();
    // One descriptor stays open, and begins again.
    let mut open = rustix::fs::Dir::read_from(File::open(&dir).unwrap()).unwrap();
    let mut check = |expected: &[&str]| {
        // The kernel caches the first listing, and answers the second one from its cache.
        for _ in 0..2 {
            assert_eq!(listed(&dir), expected);
            open.rewind();
            let names = (&mut open).map(|entry| entry.unwrap().file_name().to_owned());
            assert_eq!(names.count(), expected.len() + 2);
        }
    };
    for _ in 0..20 {
        check(&[]);
        fs::write(dir.join("a"), b"").unwrap();
        check(&["a"]);
        fs::hard_link(dir.join("a"), dir.join("b")).unwrap();
        check(&["a", "b"]);
        fs::rename(dir.join("a"), dir.join("c")).unwrap();
        check(&["b", "c"]);
        fs::create_dir(dir.join("a")).unwrap();
        check(&["a", "b", "c"]);
        fs::rename(dir.join("c"), other.join("c")).unwrap();
        fs::rename(dir.join("b"), other.join("b")).unwrap();
        check(&["a"]);
        std::os::unix::fs::symlink("a", other.join("l")).unwrap();
        fs::rename(other.join("l"), dir.join("l")).unwrap();
        check(&["a", "l"]);
        fs::remove_file(dir.join("l")).unwrap();
        fs::remove_dir(dir.join("a")).unwrap();
        fs::remove_file(other.join("b")).unwrap();
        fs::remove_file(other.join("c")).unwrap();
    }
}

#[test]
fn a_listing_in_progress_shows_each_entry_that_is_not_removed_meanwhile() {
    const COUNT: usize = 2000;
    let v = Volume::mounted();
    for _ in 0..2 {
        let name = |n: usize| v.at(&format!("{n}"));
        (0..COUNT).for_each(|n| fs::write(name(n), b"").unwrap());
        let mut seen = std::collections::HashSet::new();
        let mut entries = fs::read_dir(v.mnt()).unwrap();
        let of = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
        seen.extend(entries.by_ref().take(10).map(of));
        (0..COUNT / 2).for_each(|n| fs::remove_file(name(n)).unwrap());
        seen.extend(entries.map(of));
        for n in COUNT / 2..COUNT {
            assert!(seen.contains(std::ffi::OsStr::new(&format!("{n}"))), "{n}");
        }
        assert_eq!(listed(&v.mnt()).len(), COUNT / 2);
        (COUNT / 2..COUNT).for_each(|n| fs::remove_file(name(n)).unwrap());
        assert!(listed(&v.mnt()).is_empty());
    }
}

/// Reads the next entries of a directory, as one getdents64(2) with a buffer of `bytes`. Returns their names.
fn next_names(dir: &File, bytes: usize) -> Vec<String> {
    let mut buffer = Vec::with_capacity(bytes);
    let mut entries = rustix::fs::RawDir::new(dir, buffer.spare_capacity_mut());
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let name = entry.unwrap().file_name().to_str().unwrap().to_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
        if entries.is_buffer_empty() {
            break;
        }
    }
    names
}

/// Reads the rest of a directory.
fn names_to_the_end(dir: &File) -> Vec<String> {
    let mut names = Vec::new();
    loop {
        let next = next_names(dir, 32 << 10);
        if next.is_empty() {
            return names;
        }
        names.extend(next);
    }
}

#[test]
fn a_listing_shows_what_was_changed_before_it_began_whatever_other_listings_are_in_progress() {
    let v = Volume::mounted();
    let dir = v.at("dir");
    fs::create_dir(&dir).unwrap();
    let make = |name: &str| fs::write(dir.join(name), b"").unwrap();
    (0..300).for_each(|n| make(&format!("old{n}")));
    for round in 0..20 {
        make(&format!("round{round}"));
        // Ends only after the changes, so it may show the directory as it was before them.
        let early = File::open(&dir).unwrap();
        assert!(!next_names(&early, 8 << 10).is_empty());
        (0..20).for_each(|n| make(&format!("new{round}.{n}")));
        (0..5).for_each(|n| fs::remove_file(dir.join(format!("old{}", round * 5 + n))).unwrap());

        let late = File::open(&dir).unwrap();
        let mut seen = next_names(&late, 256);
        names_to_the_end(&early);
        seen.extend(names_to_the_end(&late));
        seen.sort_unstable();
        assert_eq!(seen, listed(&dir), "round {round}");
    }
}

#[test]
fn a_listing_goes_on_after_its_last_entry_was_removed_and_others_have_listed_the_directory() {
    let v = Volume::mounted();
    // With 126 names of this length the kernel's copy of the listing ends at the end of a page.
    for count in 120..136 {
        let dir = v.at(&format!("dir{count}"));
        fs::create_dir(&dir).unwrap();
        (0..count).for_each(|n| fs::write(dir.join(format!("{n:03}")), b"").unwrap());
        let open = File::open(&dir).unwrap();
        let mut seen = next_names(&open, 512);
        let last = seen.pop().unwrap();
        fs::remove_file(dir.join(last)).unwrap();
        for _ in 0..3 {
            assert_eq!(listed(&dir).len(), count - 1);
        }
        seen.extend(names_to_the_end(&open));
        seen.sort_unstable();
        assert_eq!(seen, listed(&dir), "{count}");
    }
}

fn many_entries(count: usize) {
    let v = Volume::of_size(if count > 100_000 { "2G" } else { "256M" });
    v.mount();
    fs::create_dir(v.at("many")).unwrap();
    for i in 0..count {
        File::create(v.at("many").join(format!("entry-{i:07}"))).unwrap();
    }
    let listed = |v: &Volume| {
        let mut names: Vec<_> = fs::read_dir(v.at("many"))
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        names.sort();
        names
    };
    let names = listed(&v);
    assert_eq!(names.len(), count, "each entry once");
    assert_eq!(names[0], "entry-0000000");
    assert_eq!(
        names[count - 1].to_str().unwrap(),
        format!("entry-{:07}", count - 1)
    );
    v.remount();
    assert!(listed(&v) == names, "the same after a mount");
    for name in names.iter().step_by(97) {
        fs::metadata(v.at("many").join(name)).unwrap();
    }
    // A listing that removes entries must still reach every entry.
    for entry in fs::read_dir(v.at("many")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    fs::remove_dir(v.at("many")).unwrap();
    v.umount();
    v.check();
}

#[test]
fn a_directory_of_twenty_thousand_entries_lists_each_once() {
    many_entries(20_000);
}

#[test]
#[ignore = "takes minutes; run with --ignored"]
fn a_directory_of_a_million_entries_lists_each_once() {
    many_entries(1_000_000);
}

/// With `handle NAME`, prints the handle of a file. With `open HANDLE`, prints the content of the handle's file, or the error.
const HANDLES: &str = "
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)

class Handle(ctypes.Structure):
    _fields_ = [('bytes', ctypes.c_uint), ('type', ctypes.c_int), ('value', ctypes.c_ubyte * 128)]

if sys.argv[1] == 'handle':
    handle, mount = Handle(bytes=128), ctypes.c_int()
    path = sys.argv[2].encode()
    if libc.name_to_handle_at(-100, path, ctypes.byref(handle), ctypes.byref(mount), 0) != 0:
        raise OSError(ctypes.get_errno(), 'name_to_handle_at')
    print(bytes(handle).hex())
else:
    handle = Handle.from_buffer_copy(bytes.fromhex(sys.argv[2]))
    mount = os.open('.', os.O_RDONLY)
    file = libc.open_by_handle_at(mount, ctypes.byref(handle), os.O_RDONLY)
    if file < 0:
        print(os.strerror(ctypes.get_errno()))
    elif os.path.isdir(f'/proc/self/fd/{file}'):
        print(*os.listdir(file))
    else:
        print(os.read(file, 100).decode())
";

#[test]
fn a_handle_of_a_file_opens_it_also_when_the_kernel_has_forgotten_it() {
    let v = Volume::mounted();
    fs::create_dir_all(v.at("d/e")).unwrap();
    fs::write(v.at("d/e/f"), b"content").unwrap();
    fs::write(v.at("removed"), b"content").unwrap();
    let handles = |what: &str, argument: &str| {
        let mut command = std::process::Command::new("python3");
        command.args(["-c", HANDLES, what, argument]);
        let said = super::support::succeed(command.current_dir(v.mnt()));
        said.trim().to_owned()
    };
    let names = ["d/e/f", "d/e", "removed"];
    let [file, dir, removed] = names.map(|name| handles("handle", name));
    assert_eq!(handles("open", &file), "content");
    fs::remove_file(v.at("removed")).unwrap();
    // After the remount the kernel has forgotten all files.
    v.remount();
    assert_eq!(handles("open", &file), "content");
    assert_eq!(handles("open", &dir), "f");
    assert_eq!(handles("open", &removed), "Stale file handle");
    // Another file may have got the inode number of the removed file. The handle must not open it.
    fs::write(v.at("another"), b"content").unwrap();
    assert_eq!(handles("open", &removed), "Stale file handle");
}
