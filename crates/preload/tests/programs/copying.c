/* Calls that use the offset implicitly, between reads and writes that use it. */
#include "check.h"
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>

int main(int argc, char **argv) {
    BEGIN;
    fill("data", 50000);
    unsigned char ten[10];
    int from = open("data", O_RDONLY), to = open("copy", O_RDWR | O_CREAT | O_TRUNC, 0600);

    NEXT_ARE_FROM(from, 0);
    CHECK(write(to, "0123456789", 10) == 10);
    CHECK(SUCCEEDS(sendfile(to, from, NULL, 100)) == 100);
    NEXT_ARE_FROM(from, 110);
    CHECK(lseek(to, 0, SEEK_CUR) == 110);
    CHECK(pread(to, ten, 10, 100) == 10 && is_from(ten, 10, 100));
    off_t offset = 1000;
    CHECK(SUCCEEDS(sendfile64(to, from, &offset, 50)) == 50 && offset == 1050);
    NEXT_ARE_FROM(from, 120);
    CHECK(close(from) == 0 && close(to) == 0);
    done("sendfile");

    from = open("data", O_RDONLY), to = open("copy", O_RDWR | O_CREAT | O_TRUNC, 0600);
    NEXT_ARE_FROM(from, 0);
    CHECK(write(to, "0123456789", 10) == 10);
    CHECK(SUCCEEDS(copy_file_range(from, NULL, to, NULL, 100, 0)) == 100);
    NEXT_ARE_FROM(from, 110);
    CHECK(lseek(to, 0, SEEK_CUR) == 110);
    off_t in = 500, out = 2000;
    CHECK(SUCCEEDS(copy_file_range(from, &in, to, &out, 100, 0)) == 100 && in == 600 && out == 2100);
    NEXT_ARE_FROM(from, 120);
    CHECK(write(to, "0123456789", 10) == 10 && lseek(to, 0, SEEK_CUR) == 120);
    CHECK(pread(to, ten, 10, 2050) == 10 && is_from(ten, 10, 550));
    CHECK(close(from) == 0 && close(to) == 0);
    done("copy_file_range");

    from = open("data", O_RDONLY), to = open("copy", O_RDWR | O_CREAT | O_TRUNC, 0600);
    int ends[2];
    CHECK(pipe(ends) == 0);
    NEXT_ARE_FROM(from, 0);
    CHECK(write(to, "0123456789", 10) == 10);
    CHECK(SUCCEEDS(splice(from, NULL, ends[1], NULL, 100, 0)) == 100);
    NEXT_ARE_FROM(from, 110);
    CHECK(SUCCEEDS(splice(ends[0], NULL, to, NULL, 100, 0)) == 100);
    CHECK(lseek(to, 0, SEEK_CUR) == 110);
    CHECK(pread(to, ten, 10, 10) == 10 && is_from(ten, 10, 10));
    CHECK(syscall(SYS_splice, from, NULL, ends[1], NULL, 50, 0) == 50);
    NEXT_ARE_FROM(from, 170);
    CHECK(close(from) == 0 && close(to) == 0 && close(ends[0]) == 0 && close(ends[1]) == 0);
    done("splice");

    /* Bytes left, and locks from the offset on. */
    from = open("data", O_RDWR);
    NEXT_ARE_FROM(from, 0);
    int left;
    SUCCEEDS(ioctl(from, FIONREAD, &left));
    CHECK(left == 49990);
    NEXT_ARE_FROM(from, 10);
    CHECK(close(from) == 0);
    from = open("data", O_RDWR);
    NEXT_ARE_FROM(from, 0);
    SUCCEEDS(lockf(from, F_LOCK, 10));
    pid_t pid = fork();
    if (pid == 0) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 10};
        CHECK(fcntl(from, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK);
        lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 10, .l_len = 10};
        CHECK(fcntl(from, F_GETLK, &lock) == 0 && lock.l_type == F_WRLCK);
        _exit(0);
    }
    succeeded(pid);
    CHECK(close(from) == 0);
    from = open("data", O_RDWR);
    NEXT_ARE_FROM(from, 0);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_CUR, .l_start = 20, .l_len = 10};
    SUCCEEDS(fcntl(from, F_SETLK, &lock));
    pid = fork();
    if (pid == 0) {
        struct flock found = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 100};
        CHECK(fcntl(from, F_GETLK, &found) == 0 && found.l_type == F_WRLCK && found.l_start == 30);
        _exit(0);
    }
    succeeded(pid);
    NEXT_ARE_FROM(from, 10);
    CHECK(close(from) == 0);
    done("locks");

    /* A mapping and calls see the same bytes. */
    void *(*maps[])(void *, size_t, int, int, int, off_t) = {mmap, mmap64};
    for (int i = 0; i < 2; i++) {
        int fd = open("data", O_RDWR);
        NEXT_ARE_FROM(fd, 0);
        CHECK(pwrite(fd, "before", 6, 8192) == 6);
        char *page = maps[i](NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 8192);
        CHECK(page != MAP_FAILED);
        CHECK(memcmp(page, "before", 6) == 0);
        CHECK(pwrite(fd, "call", 4, 8192) == 4);
        CHECK(memcmp(page, "callre", 6) == 0);
        memcpy(page, "mapping", 7);
        CHECK(pread(fd, ten, 7, 8192) == 7 && memcmp(ten, "mapping", 7) == 0);
        /* A second description of the file. */
        int other = open("data", O_RDWR);
        CHECK(pwrite(other, "other", 5, 8192) == 5);
        CHECK(memcmp(page, "otherng", 7) == 0);
        memcpy(page, "MAP", 3);
        CHECK(pread(other, ten, 7, 8192) == 7 && memcmp(ten, "MAPerng", 7) == 0);
        NEXT_ARE_FROM(fd, 10);
        CHECK(munmap(page, 4096) == 0 && close(fd) == 0 && close(other) == 0);
        errno = UNTOUCHED;
        CHECK(maps[i](NULL, 4096, PROT_READ, MAP_SHARED, 99, 0) == MAP_FAILED && errno == EBADF);
        CHECK(maps[i](NULL, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
        CHECK(errno == EINVAL);
    }
    done("mapping");
    return 0;
}
