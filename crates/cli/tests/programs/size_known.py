# size_known.py FILE WAY COMMAND...: a program that COMMAND starts extends a file inline while this program has the file open. Then this
# program appends. Each record must begin at the file's old end, and the descriptor's offset must be after the record.
import os, subprocess, sys

path, way, command = sys.argv[1], sys.argv[2], sys.argv[3:]
append = os.O_APPEND if way in ("offset", "same", "fork") else 0
fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | append)
if way == "offset" or way == "flag":
    os.close(fd)
    fd = os.open(path, os.O_WRONLY | append)
    other = "import os,sys\nf=os.open(sys.argv[1],os.O_WRONLY|os.O_APPEND)\nfor i in range(40): os.write(f,b'a'*100)\n"
    subprocess.run([*command, sys.executable, "-c", other, path], check=True)
elif way == "same":
    other = os.open(path, os.O_WRONLY | os.O_APPEND)
    for i in range(40):
        os.write(other, b"a" * 100)
else:  # "own": this descriptor extends the file; "fork": it does, and a child inherits it afterwards
    for i in range(40):
        os.write(fd, b"a" * 100)
    if way == "fork":
        child = os.fork()
        if not child:
            os.lseek(fd, 0, os.SEEK_CUR)
            os._exit(0)
        os.waitpid(child, 0)
expected = b"a" * 4000
for i in range(6):
    expected += b"B" * 10
    if way == "flag" or way == "own":
        assert os.pwritev(fd, [b"B" * 10], 0, os.RWF_APPEND) == 10
    else:
        assert os.write(fd, b"B" * 10) == 10
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        assert offset == len(expected), (way, i, offset)
    if way == "fork":
        # Linux appends these bytes despite the offset 3, and leaves the descriptor's offset.
        os.pwrite(fd, b"a" * 100, 3)
        expected += b"a" * 100
found = open(path, "rb").read()
assert found == expected, (way, len(found), found.find(b"B"))
print("right")
