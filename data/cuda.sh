#!/bin/sh
# What the Makefile asks about CUDA.
#
#     sh data/cuda.sh          the nvcc of PATH, of /usr/local/cuda, or of pip's packages; nothing: there is none
#     sh data/cuda.sh NVCC     what this nvcc compiles and links kvcomp with: -I.. for headers, -Xlinker -rpath=..
#                              for libraries. Where no program with cuBLAS can be linked, a line on stderr instead
#
# The toolkit brings cuBLAS. So do pip's packages (nvidia-cublas and others), whose headers and libraries lie
# apart under nvidia/ of Python's site-packages.

# The folders of pip's packages.
pip_folders() {
    python3 -c 'import site
print(*[d + "/nvidia" for d in site.getsitepackages() + [site.getusersitepackages()]])' 2>/dev/null
}

# first FILE..: the first one that exists.
first() {
    for f in "$@"; do
        [ -e "$f" ] && echo "$f" && return
    done
}

# links FLAG..: does a program with cuBLAS link with these flags?
links() {
    printf '#include <cublas_v2.h>\nint main(void) { cublasHandle_t h; return cublasCreate(&h); }\n' >"$d/a.cpp"
    "$nvcc" -o "$d/a" "$d/a.cpp" "$@" >/dev/null 2>&1
}

if [ $# = 0 ]; then
    command -v nvcc || first /usr/local/cuda/bin/nvcc $(for p in $(pip_folders); do echo "$p"/*/bin/nvcc; done)
    exit 0
fi

nvcc=$1
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
if links -lcublas; then
    echo "-Xlinker -rpath=$(dirname "$nvcc")/../lib64"
    exit 0
fi

headers= ways= rpaths= cublas=
for p in $(pip_folders); do
    [ -d "$p" ] || continue
    for f in "$p"/*/include; do headers="$headers -I$f"; done
    for f in "$p"/*/lib; do
        ways="$ways -L$f -Xlinker -rpath-link=$f"
        rpaths="$rpaths -Xlinker -rpath=$f"
    done
    cublas=${cublas:-$(first "$p"/*/lib/libcublas.so.*)}
done
if [ -n "$cublas" ] && links $headers -Xlinker "$cublas" $ways; then
    echo "$headers $rpaths"
else
    echo "$nvcc cannot build a program with cuBLAS (no g++, or no cuBLAS, is found): building for the CPU alone" >&2
fi
