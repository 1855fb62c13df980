/* Reads a file while a timer signal interrupts the program every 50 us. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/time.h>
#include <unistd.h>

static volatile long ticks;

static void tick(int signal) {
    (void)signal;
    ticks++;
}

int main(int argc, char **argv) {
    struct sigaction action = {.sa_handler = tick};
    struct itimerval often = {{0, 50}, {0, 50}}, never = {{0, 0}, {0, 0}};
    char byte;
    if (argc != 2) return 2;
    int fd = open(argv[1], O_RDONLY);
    if (fd < 0 || sigaction(SIGALRM, &action, NULL) != 0 || setitimer(ITIMER_REAL, &often, NULL) != 0) return 3;
    while (ticks == 0) {}
    for (int i = 0; i < 100; i++)
        if (pread(fd, &byte, 1, 0) != 1) return 4;
    if (setitimer(ITIMER_REAL, &never, NULL) != 0) return 5;
    puts("read");
    return 0;
}
