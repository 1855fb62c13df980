/* Each call that takes an address fails with EFAULT for an unmapped one, as in the kernel, and does no harm. Plain buffers of
   read and write are not covered (see the documentation), except in the first page. */
#include "check.h"
#include <sched.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define PAGE 4096

int main(int argc, char **argv) {
    CHECK(argc > 1 && chdir(argv[1]) == 0);
    fill("file", 64 << 10);
    int fd = open("file", O_RDWR);
    char byte[16];
    /* Enough calls for the fd to go inline. */
    for (int i = 0; i < 100; i++) CHECK(pread(fd, byte, 10, 0) == 10 && is_from(byte, 10, 0));
    for (int i = 0; i < 100; i++) CHECK(pwrite(fd, byte, 10, 0) == 10);

    /* A mapped page, followed by an unmapped one. */
    char *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && mprotect(pages + PAGE, PAGE, PROT_NONE) == 0);
    void *bad[] = {NULL, (void *)8, pages + PAGE, pages + PAGE - 8, (void *)-1, (void *)-4096};
    int count = sizeof bad / sizeof *bad;

    for (int i = 0; i < count; i++) {
        struct iovec *list = bad[i];
        FAILS(readv(fd, list, 2), EFAULT);
        FAILS(writev(fd, list, 2), EFAULT);
        FAILS(preadv(fd, list, 2, 0), EFAULT);
        FAILS(pwritev(fd, list, 2, 0), EFAULT);
        FAILS(preadv2(fd, list, 2, 0, 0), EFAULT);
        FAILS(pwritev2(fd, list, 2, 0, 0), EFAULT);
        FAILS(syscall(SYS_readv, fd, list, 2), EFAULT);
        FAILS(fcntl(fd, F_SETLK, bad[i]), EFAULT);
        FAILS(fcntl(fd, F_SETLKW, bad[i]), EFAULT);
        FAILS(fcntl(fd, F_GETLK, bad[i]), EFAULT);
        FAILS(fcntl(fd, F_OFD_SETLK, bad[i]), EFAULT);
        FAILS(fcntl(fd, F_OFD_GETLK, bad[i]), EFAULT);
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
        FAILS(sendmsg(pair[0], bad[i], 0), EFAULT);
        FAILS(sendmmsg(pair[0], bad[i], 2, 0), EFAULT);
        FAILS(recvmsg(pair[1], bad[i], MSG_DONTWAIT), EFAULT);
        /* A message whose control bytes are not mapped. */
        struct iovec one = {byte, 1};
        struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1};
        message.msg_control = bad[i];
        message.msg_controllen = CMSG_SPACE(sizeof(int));
        if (bad[i]) FAILS(sendmsg(pair[0], &message, 0), EFAULT);
        CHECK(close(pair[0]) == 0 && close(pair[1]) == 0);
        if (bad[i]) {
            FAILS(syscall(SYS_clone3, bad[i], 88), EFAULT);
        }
        /* A short string may lie before the end of a page. */
        if (bad[i] && bad[i] != pages + PAGE - 8) {
            struct stat status;
            FAILS(fstatat(fd, bad[i], &status, AT_EMPTY_PATH), EFAULT);
            struct statx extended;
            FAILS(statx(fd, bad[i], AT_EMPTY_PATH, STATX_SIZE, &extended), EFAULT);
            FAILS(open(bad[i], O_RDONLY), EFAULT);
            FAILS(sendfile(fd, fd, bad[i], 1), EFAULT);
            FAILS(copy_file_range(fd, bad[i], fd, NULL, 1, 0), EFAULT);
        }
    }
    /* In the first page, where NULL plus an offset points. */
    for (int i = 0; i < 2; i++) {
        void *buffer = bad[i];
        struct iovec part = {buffer, 10};
        FAILS(read(fd, buffer, 10), EFAULT);
        FAILS(pread(fd, buffer, 10, 0), EFAULT);
        FAILS(write(fd, buffer, 10), EFAULT);
        FAILS(pwrite(fd, buffer, 10, 0), EFAULT);
        FAILS(readv(fd, &part, 1), EFAULT);
        FAILS(preadv(fd, &part, 1, 0), EFAULT);
        FAILS(writev(fd, &part, 1), EFAULT);
        FAILS(pwritev(fd, &part, 1, 0), EFAULT);
    }
    /* Mapped lists in all places: on the heap, at the end of a page, across two pages. */
    CHECK(mprotect(pages + PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
    struct iovec *lists[] = {malloc(2 * sizeof(struct iovec)), (void *)(pages + PAGE - 32),
                             (void *)(pages + PAGE - 16)};
    for (int i = 0; i < 3; i++) {
        char halves[2][5];
        lists[i][0] = (struct iovec){halves[0], 5};
        lists[i][1] = (struct iovec){halves[1], 5};
        CHECK(SUCCEEDS(preadv(fd, lists[i], 2, 100)) == 10);
        CHECK(is_from(halves[0], 5, 100) && is_from(halves[1], 5, 105));
        CHECK(SUCCEEDS(pwritev(fd, lists[i], 2, 100)) == 10);
    }
    struct flock *lock = (void *)(pages + PAGE - 8);
    memset(lock, 0, sizeof *lock);
    *lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_CUR, .l_len = 1};
    SUCCEEDS(fcntl(fd, F_SETLK, lock));
    CHECK(lseek(fd, 0, SEEK_CUR) == 0);
    NEXT_ARE_FROM(fd, 0);
    done("every address is judged as by the kernel");
    return 0;
}
