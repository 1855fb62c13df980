/* The effect of a description's flags on its writes. */
#include "check.h"

static long size_of(int fd) {
    struct stat stat;
    CHECK(fstat(fd, &stat) == 0);
    return stat.st_size;
}

static void is(const char *name, const char *text) {
    char found[64] = {0};
    int fd = open(name, O_RDONLY);
    CHECK(read(fd, found, sizeof found - 1) == (ssize_t)strlen(text) && strcmp(found, text) == 0);
    CHECK(close(fd) == 0);
}

int main(int argc, char **argv) {
    BEGIN;
    char c;
    int fd = open("appended", O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0600);
    CHECK(write(fd, "one", 3) == 3);
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    CHECK(write(fd, "two", 3) == 3);
    CHECK(lseek(fd, 0, SEEK_CUR) == 6);
    /* Two descriptions; each appends at the end that the other has moved. */
    int other = open("appended", O_WRONLY | O_APPEND);
    CHECK(write(other, "three", 5) == 5);
    CHECK(write(fd, "four", 4) == 4);
    CHECK(lseek(fd, 0, SEEK_CUR) == 15 && lseek(other, 0, SEEK_CUR) == 11);
    /* As on Linux: the offset of a pwrite is ignored. */
    CHECK(pwrite(fd, "five", 4, 0) == 4);
    is("appended", "onetwothreefourfive");
    CHECK(close(other) == 0 && close(fd) == 0);

    fd = open("changed", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(write(fd, "0123456789", 10) == 10 && lseek(fd, 2, SEEK_SET) == 2);
    CHECK(write(fd, "ab", 2) == 2);
    int flags = SUCCEEDS(fcntl(fd, F_GETFL));
    SUCCEEDS(fcntl(fd, F_SETFL, flags | O_NONBLOCK));
    CHECK(read(fd, &c, 1) == 1 && c == '4');
    SUCCEEDS(fcntl(fd, F_SETFL, flags | O_APPEND));
    CHECK(write(fd, "end", 3) == 3 && lseek(fd, 0, SEEK_CUR) == 13);
    SUCCEEDS(fcntl(fd, F_SETFL, flags));
    CHECK(lseek(fd, 0, SEEK_SET) == 0 && write(fd, "AB", 2) == 2);
    is("changed", "AB" "ab" "456789end");
    FAILS(fcntl(fd, 12345, 0), EINVAL);
    FAILS(fcntl(99, F_GETFL), EBADF);
    CHECK(read(fd, &c, 1) == 1 && c == 'a');
    SUCCEEDS(fcntl(fd, F_SETFD, FD_CLOEXEC));
    CHECK(SUCCEEDS(fcntl(fd, F_GETFD)) == FD_CLOEXEC);

    /* Truncated and extended while it is open, also by another description. */
    other = open("changed", O_RDWR);
    CHECK(ftruncate(other, 5) == 0 && size_of(fd) == 5);
    CHECK(lseek(fd, 0, SEEK_END) == 5 && read(fd, &c, 1) == 0);
    CHECK(ftruncate(fd, 100) == 0 && size_of(other) == 100);
    CHECK(pread(other, &c, 1, 50) == 1 && c == 0);
    CHECK(truncate("changed", 0) == 0 && size_of(fd) == 0);
    CHECK(pread(fd, &c, 1, 0) == 0);
    CHECK(write(fd, "x", 1) == 1 && size_of(other) == 6);
    CHECK(close(other) == 0);
    other = open("changed", O_RDWR | O_TRUNC);
    CHECK(size_of(fd) == 0 && pread(fd, &c, 1, 0) == 0);
    CHECK(close(other) == 0);

    /* Synchronous, and removed while it is open. */
    other = open("changed", O_RDWR | O_SYNC);
    CHECK(write(other, "sync", 4) == 4 && fsync(other) == 0 && fdatasync(fd) == 0);
    CHECK(unlink("changed") == 0);
    CHECK(pread(fd, &c, 1, 3) == 1 && c == 'c');
    CHECK(pwrite(fd, "still", 5, 0) == 5);
    CHECK(pread(other, &c, 1, 4) == 1 && c == 'l');
    CHECK(close(other) == 0 && close(fd) == 0);
    done("flags");
    return 0;
}
