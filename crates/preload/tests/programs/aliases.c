/* Every name of every call that transfers bytes, opens or queries: same bytes, same errno. */
#include "check.h"
#include <sys/uio.h>
#include <sys/syscall.h>

int __open(const char *, int, ...);
int __open64(const char *, int, ...);
int __open_2(const char *, int);
int __open64_2(const char *, int);
int __openat_2(int, const char *, int);
int __openat64_2(int, const char *, int);
ssize_t __read(int, void *, size_t);
ssize_t __read_chk(int, void *, size_t, size_t);
ssize_t __pread64(int, void *, size_t, off_t);
ssize_t __pread_chk(int, void *, size_t, off_t, size_t);
ssize_t __pread64_chk(int, void *, size_t, off_t, size_t);
ssize_t __write(int, const void *, size_t);
ssize_t __pwrite64(int, const void *, size_t, off_t);
off_t __lseek(int, off_t, int);
int __close(int);
int __dup2(int, int);
int __fcntl(int, int, ...);
int __fxstat(int, int, struct stat *);
int __fxstat64(int, int, struct stat64 *);
int __fxstatat(int, int, const char *, struct stat *, int);
int __fxstatat64(int, int, const char *, struct stat64 *, int);

#define SIZE 100000

static void closes(int fd) { SUCCEEDS(close(fd)); }

static void opens(void) {
    int descriptors[] = {
        SUCCEEDS(open("data", O_RDONLY)),
        SUCCEEDS(open64("data", O_RDONLY)),
        SUCCEEDS(__open("data", O_RDONLY)),
        SUCCEEDS(__open64("data", O_RDONLY)),
        SUCCEEDS(__open_2("data", O_RDONLY)),
        SUCCEEDS(__open64_2("data", O_RDONLY)),
        SUCCEEDS(openat(AT_FDCWD, "data", O_RDONLY)),
        SUCCEEDS(openat64(AT_FDCWD, "data", O_RDONLY)),
        SUCCEEDS(__openat_2(AT_FDCWD, "data", O_RDONLY)),
        SUCCEEDS(__openat64_2(AT_FDCWD, "data", O_RDONLY)),
    };
    for (size_t i = 0; i < sizeof descriptors / sizeof *descriptors; i++) {
        /* Each with an offset of its own, from the beginning of the file. */
        NEXT_ARE_FROM(descriptors[i], 0);
        NEXT_ARE_FROM(descriptors[i], 10);
        closes(descriptors[i]);
        FAILS(read(descriptors[i], &descriptors, 1), EBADF);
    }
    FAILS(open("missing", O_RDONLY), ENOENT);
    FAILS(openat(-100 - 1, "data", O_RDONLY), EBADF);

    /* With a mode. */
    struct stat stat;
    umask(0);
    int made[] = {
        SUCCEEDS(open("made0", O_RDWR | O_CREAT | O_EXCL, 0640)),
        SUCCEEDS(open64("made1", O_RDWR | O_CREAT | O_EXCL, 0640)),
        SUCCEEDS(openat(AT_FDCWD, "made2", O_RDWR | O_CREAT | O_EXCL, 0640)),
        SUCCEEDS(openat64(AT_FDCWD, "made3", O_RDWR | O_CREAT | O_EXCL, 0640)),
        SUCCEEDS(creat("made4", 0640)),
        SUCCEEDS(creat64("made5", 0640)),
    };
    for (int i = 0; i < 6; i++) {
        char name[16];
        snprintf(name, sizeof name, "made%d", i);
        CHECK(write(made[i], "0123456789", 10) == 10);
        CHECK(fstat(made[i], &stat) == 0);
        CHECK(stat.st_size == 10 && (stat.st_mode & 07777) == 0640);
        closes(made[i]);
        CHECK(unlink(name) == 0);
    }

    char names[][24] = {"tXXXXXX", "tXXXXXX", "tXXXXXX", "tXXXXXX",
                        "tXXXXXX.x", "tXXXXXX.x", "tXXXXXX.x", "tXXXXXX.x"};
    int temporary[] = {
        SUCCEEDS(mkstemp(names[0])),
        SUCCEEDS(mkstemp64(names[1])),
        SUCCEEDS(mkostemp(names[2], O_APPEND)),
        SUCCEEDS(mkostemp64(names[3], O_CLOEXEC)),
        SUCCEEDS(mkstemps(names[4], 2)),
        SUCCEEDS(mkstemps64(names[5], 2)),
        SUCCEEDS(mkostemps(names[6], 2, O_CLOEXEC)),
        SUCCEEDS(mkostemps64(names[7], 2, O_APPEND)),
    };
    for (int i = 0; i < 8; i++) {
        CHECK(write(temporary[i], "0123456789", 10) == 10);
        CHECK(lseek(temporary[i], 0, SEEK_SET) == 0);
        CHECK(write(temporary[i], "abc", 3) == 3);
        CHECK(fstat(temporary[i], &stat) == 0);
        CHECK(stat.st_size == (i == 2 || i == 7 ? 13 : 10));
        closes(temporary[i]);
        CHECK(unlink(names[i]) == 0);
    }
    done("opens");
}

static void reads(void) {
    unsigned char b[8192];
    int fd = SUCCEEDS(open("data", O_RDONLY));
    long from = 0;
#define READS(call, count)                                                                         \
    do {                                                                                           \
        memset(b, 0, sizeof b);                                                                    \
        CHECK(SUCCEEDS(call) == (count));                                                          \
        CHECK(is_from(b, count, from));                                                            \
        from += (count);                                                                           \
        CHECK(lseek(fd, 0, SEEK_CUR) == from);                                                     \
    } while (0)
    READS(read(fd, b, 4096), 4096);
    READS(__read(fd, b, 5000), 5000);
    READS(__read_chk(fd, b, 5000, sizeof b), 5000);
    struct iovec v[] = {{b, 100}, {NULL, 0}, {b + 100, 4000}};
    READS(readv(fd, v, 3), 4100);
    READS(preadv2(fd, v, 3, -1, 0), 4100);
    READS(preadv64v2(fd, v, 3, -1, 0), 4100);
    /* More parts than the library tries inline. */
    struct iovec many[1024];
    for (int i = 0; i < 1024; i++) many[i] = (struct iovec){b + i * 8, 8};
    READS(readv(fd, many, 65), 65 * 8);
    READS(readv(fd, many, 1024), 8192);
    READS(read(fd, b, 0), 0);
    READS(syscall(SYS_read, fd, b, 1000), 1000);
    READS(syscall(SYS_readv, fd, v, 3), 4100);
    FAILS(readv(fd, many, 1025), EINVAL);
    FAILS(readv(fd, many, -1), EINVAL);
    FAILS(read(fd, NULL, 10), EFAULT);
    FAILS(readv(fd, &(struct iovec){NULL, 10}, 1), EFAULT);
    FAILS(readv(fd, (struct iovec[]){{b, (size_t)-1}, {b, 10}}, 2), EINVAL);
    FAILS(read(-1, b, 10), EBADF);
    FAILS(read(99, b, 10), EBADF);
    FAILS(read(1 << 20, b, 10), EBADF);
    READS(read(fd, b, 777), 777);

    long offsets[] = {0, 1, 4095, 4096, 8191, 50000, SIZE - 4100};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        long offset = offsets[i], before = lseek(fd, 0, SEEK_CUR);
#define READS_AT(call)                                                                             \
    do {                                                                                           \
        memset(b, 0, sizeof b);                                                                    \
        CHECK(SUCCEEDS(call) == 4100);                                                             \
        CHECK(is_from(b, 4100, offset));                                                           \
        CHECK(lseek(fd, 0, SEEK_CUR) == before);                                                   \
    } while (0)
        READS_AT(pread(fd, b, 4100, offset));
        READS_AT(pread64(fd, b, 4100, offset));
        READS_AT(__pread64(fd, b, 4100, offset));
        READS_AT(__pread_chk(fd, b, 4100, offset, sizeof b));
        READS_AT(__pread64_chk(fd, b, 4100, offset, sizeof b));
        READS_AT(preadv(fd, v, 3, offset));
        READS_AT(preadv64(fd, v, 3, offset));
        READS_AT(preadv2(fd, v, 3, offset, 0));
        READS_AT(preadv64v2(fd, v, 3, offset, 0));
        READS_AT(syscall(SYS_pread64, fd, b, 4100, offset));
    }
    FAILS(pread(fd, b, 1, -1), EINVAL);
    FAILS(preadv(fd, v, 3, -2), EINVAL);
    FAILS(pread(fd, NULL, 10, 0), EFAULT);
    FAILS(preadv2(fd, v, 3, 0, 1 << 30), EOPNOTSUPP);
    /* The end of the file. */
    CHECK(SUCCEEDS(pread(fd, b, 4096, SIZE - 10)) == 10);
    CHECK(SUCCEEDS(pread(fd, b, 4096, SIZE)) == 0);
    CHECK(SUCCEEDS(pread(fd, b, 4096, SIZE + 100000)) == 0);
    CHECK(SUCCEEDS(lseek(fd, -5, SEEK_END)) == SIZE - 5);
    CHECK(SUCCEEDS(read(fd, b, 4096)) == 5);
    CHECK(SUCCEEDS(read(fd, b, 4096)) == 0);
    FAILS(write(fd, b, 1), EBADF);
    FAILS(pwrite(fd, b, 1, 0), EBADF);
    closes(fd);

    int directory = SUCCEEDS(open(".", O_RDONLY | O_DIRECTORY));
    FAILS(read(directory, b, 10), EISDIR);
    closes(directory);
    int path = SUCCEEDS(open("data", O_PATH));
    FAILS(read(path, b, 10), EBADF);
    closes(path);
    done("reads");
}

static void writes(void) {
    unsigned char b[8192];
    int fd = SUCCEEDS(open("written", O_RDWR | O_CREAT | O_TRUNC, 0600));
    long to = 0;
#define WRITES(call, count)                                                                        \
    do {                                                                                           \
        for (long i = 0; i < (count); i++) b[i] = at(to + i);                                      \
        CHECK(SUCCEEDS(call) == (count));                                                          \
        to += (count);                                                                             \
        CHECK(lseek(fd, 0, SEEK_CUR) == to);                                                       \
    } while (0)
    const struct iovec v[] = {{b, 100}, {NULL, 0}, {b + 100, 4000}};
    struct iovec many[1024];
    for (int i = 0; i < 1024; i++) many[i] = (struct iovec){b + i * 8, 8};
    WRITES(write(fd, b, 4096), 4096);
    WRITES(__write(fd, b, 5000), 5000);
    WRITES(writev(fd, v, 3), 4100);
    WRITES(writev(fd, many, 65), 65 * 8);
    WRITES(writev(fd, many, 1024), 8192);
    WRITES(pwritev2(fd, v, 3, -1, 0), 4100);
    WRITES(pwritev64v2(fd, v, 3, -1, 0), 4100);
    WRITES(write(fd, b, 0), 0);
    WRITES(syscall(SYS_write, fd, b, 1000), 1000);
    WRITES(syscall(SYS_writev, fd, v, 3), 4100);
    FAILS(write(fd, NULL, 10), EFAULT);
    FAILS(writev(fd, many, 1025), EINVAL);
    WRITES(write(fd, b, 777), 777);
    long before = to;
#define WRITES_AT(call)                                                                            \
    do {                                                                                           \
        for (long i = 0; i < 4100; i++) b[i] = at(to + i);                                         \
        CHECK(SUCCEEDS(call) == 4100);                                                             \
        to += 4100;                                                                                \
        CHECK(lseek(fd, 0, SEEK_CUR) == before);                                                   \
    } while (0)
    WRITES_AT(pwrite(fd, b, 4100, to));
    WRITES_AT(pwrite64(fd, b, 4100, to));
    WRITES_AT(__pwrite64(fd, b, 4100, to));
    WRITES_AT(pwritev(fd, v, 3, to));
    WRITES_AT(pwritev64(fd, v, 3, to));
    WRITES_AT(pwritev2(fd, v, 3, to, 0));
    WRITES_AT(pwritev64v2(fd, v, 3, to, 0));
    WRITES_AT(syscall(SYS_pwrite64, fd, b, 4100, to));
    FAILS(pwrite(fd, b, 1, -1), EINVAL);
    for (long offset = 0; offset < to; offset += 5000) {
        long count = to - offset < 5000 ? to - offset : 5000;
        CHECK(pread(fd, b, count, offset) == count);
        CHECK(is_from(b, count, offset));
    }
    /* A hole. */
    CHECK(SUCCEEDS(pwrite(fd, "x", 1, to + 10000)) == 1);
    CHECK(pread(fd, b, 100, to + 5000) == 100);
    for (int i = 0; i < 100; i++) CHECK(b[i] == 0);
    closes(fd);
    fd = SUCCEEDS(open("written", O_WRONLY));
    FAILS(read(fd, b, 1), EBADF);
    closes(fd);
    done("writes");
}

static void seeks(void) {
    int fd = SUCCEEDS(open("data", O_RDONLY));
    CHECK(SUCCEEDS(lseek(fd, 10, SEEK_SET)) == 10);
    CHECK(SUCCEEDS(lseek64(fd, 10, SEEK_CUR)) == 20);
    CHECK(SUCCEEDS(__lseek(fd, 0, SEEK_END)) == SIZE);
    CHECK(SUCCEEDS(syscall(SYS_lseek, fd, 30, SEEK_SET)) == 30);
    NEXT_ARE_FROM(fd, 30);
    FAILS(lseek(fd, -1, SEEK_SET), EINVAL);
    FAILS(lseek(fd, 0, 99), EINVAL);
    FAILS(lseek(fd, SIZE + 1, SEEK_DATA), ENXIO);
    CHECK(SUCCEEDS(lseek(fd, 0, SEEK_HOLE)) == SIZE);
    CHECK(SUCCEEDS(lseek(fd, 70, SEEK_DATA)) == 70);
    NEXT_ARE_FROM(fd, 70);
    FAILS(lseek(99, 0, SEEK_SET), EBADF);
    int ends[2];
    CHECK(pipe(ends) == 0);
    FAILS(lseek(ends[0], 0, SEEK_SET), ESPIPE);
    closes(ends[0]);
    closes(ends[1]);
    closes(fd);
    done("seeks");
}

static void asks(void) {
    int fd = SUCCEEDS(open("asked", O_RDWR | O_CREAT | O_TRUNC, 0600));
    struct stat a;
    struct stat64 b;
    struct statx x;
    for (long size = 0; size < 20000; size += 3000) {
        CHECK(ftruncate(fd, size) == 0);
        CHECK(pwrite(fd, "0123456789", 10, size) == 10);
#define ASKS(call, field)                                                                          \
    do {                                                                                           \
        memset(&a, 0, sizeof a), memset(&b, 0, sizeof b), memset(&x, 0, sizeof x);                 \
        SUCCEEDS(call);                                                                            \
        CHECK(field == size + 10);                                                                 \
    } while (0)
        ASKS(fstat(fd, &a), a.st_size);
        ASKS(fstat64(fd, &b), b.st_size);
        ASKS(__fxstat(1, fd, &a), a.st_size);
        ASKS(__fxstat64(1, fd, &b), b.st_size);
        ASKS(fstatat(fd, "", &a, AT_EMPTY_PATH), a.st_size);
        ASKS(fstatat64(fd, "", &b, AT_EMPTY_PATH), b.st_size);
        ASKS(__fxstatat(1, fd, "", &a, AT_EMPTY_PATH), a.st_size);
        ASKS(__fxstatat64(1, fd, "", &b, AT_EMPTY_PATH), b.st_size);
        ASKS(statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &x), (long)x.stx_size);
        ASKS(fstatat(AT_FDCWD, "asked", &a, 0), a.st_size);
        ASKS(stat("asked", &a), a.st_size);
        ASKS(statx(AT_FDCWD, "asked", 0, STATX_BASIC_STATS, &x), (long)x.stx_size);
    }
    FAILS(fstat(99, &a), EBADF);
    FAILS(fstatat(99, "", &a, AT_EMPTY_PATH), EBADF);
    closes(fd);
    done("asks");
}

int main(int argc, char **argv) {
    BEGIN;
    fill("data", SIZE);
    opens();
    reads();
    writes();
    seeks();
    asks();
    return 0;
}
