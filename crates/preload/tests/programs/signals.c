/* Signal handlers that read and write the file whose calls they interrupt. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

#define SIGNALS 300
static int fd, own;
static volatile sig_atomic_t seen, wrong;
/* One signal, a little later. The handler sets the next timer: a periodic timer would leave a slow host no time between two
   signals. */
static const struct itimerval soon = {{0, 0}, {0, 300}};

static void handler(int signal) {
    (void)signal;
    int before = errno;
    unsigned char bytes[600];
    seen++;
    if (pread(fd, bytes, sizeof bytes, seen * 100) != sizeof bytes || !is_from(bytes, sizeof bytes, seen * 100))
        wrong = 1;
    if (pwrite(own, &(int){seen}, sizeof(int), seen * sizeof(int)) != sizeof(int)) wrong = 2;
    int copy = dup(fd);
    if (copy < 0 || pread(copy, bytes, 10, 0) != 10 || close(copy) != 0) wrong = 3;
    int fresh = open("data", O_RDONLY);
    if (fresh < 0 || read(fresh, bytes, 10) != 10 || !is_from(bytes, 10, 0) || close(fresh) != 0) wrong = 4;
    if (seen < SIGNALS) setitimer(ITIMER_REAL, &soon, NULL);
    errno = before;
}

static void nothing(int signal) { (void)signal; }

int main(int argc, char **argv) {
    BEGIN;
    fill("data", 200000);
    fd = open("data", O_RDWR);
    own = open("own", O_RDWR | O_CREAT | O_TRUNC, 0600);
    struct sigaction action = {.sa_handler = handler};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
    unsigned char bytes[5000];
    for (long i = 0; seen < SIGNALS; i++) {
        long offset = i * 4999 % 190000;
        ssize_t count;
        do count = pread(fd, bytes, sizeof bytes, offset);
        while (count == -1 && errno == EINTR);
        CHECK(count == sizeof bytes && is_from(bytes, sizeof bytes, offset));
        do count = pwrite(fd, bytes, sizeof bytes, offset);
        while (count == -1 && errno == EINTR);
        CHECK(count == sizeof bytes);
        CHECK(lseek(fd, offset, SEEK_SET) == offset);
        do count = read(fd, bytes, 777);
        while (count == -1 && errno == EINTR);
        CHECK(count == 777 && is_from(bytes, 777, offset));
        CHECK(lseek(fd, 0, SEEK_CUR) == offset + 777);
    }
    CHECK(setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL) == 0);
    CHECK(wrong == 0);
    for (int i = 1; i <= SIGNALS; i++) {
        int number;
        CHECK(pread(own, &number, sizeof number, i * sizeof number) == sizeof number && number == i);
    }
    done("handlers");

    /* A signal interrupts a read that waits for a pipe, as it does without the library. The timer repeats until then, so the read
       may begin at any time. */
    action.sa_handler = nothing;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    int ends[2];
    CHECK(pipe(ends) == 0);
    struct itimerval often = {{0, 300}, {0, 300}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    FAILS(read(ends[0], bytes, 1), EINTR);
    CHECK(setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL) == 0);
    done("interrupted");
    return 0;
}
