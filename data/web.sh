#!/bin/sh
# The program as one page for a browser, which opens by double click:
#
#     sh data/web.sh install           installs emscripten where there is no emcc, and says so (Debian)
#     sh data/web.sh build FILE.c..    the same, and kvcomp.html: data/page.html with the program, as WebAssembly, and
#                                      the model inside
#     sh data/web.sh test              the page beside ./kvcomp, in node and in headless Chromium; what is not installed
#                                      is left out, and counted
model=${WEB_MODEL:-models/kvcomp-tiny}

# Is there an emcc that can run? Debian's reads what it writes with acorn, a package of its own there.
has_emcc() {
    case "$(command -v emcc)" in
        "") return 1 ;;
        /usr/bin/emcc) [ -n "$NODE_PATH" ] || [ -d /usr/share/nodejs/acorn ] ;;
    esac
}

# The program FILE.c.. becomes kvcomp_web.js and kvcomp_web.wasm. stb_ds.h is copied, because /usr/include holds the
# headers of another machine. Debian's emscripten looks for acorn in NODE_PATH.
program() {
    rm -rf build/web
    mkdir -p build/web/stb
    cp "$(echo '#include <stb/stb_ds.h>' | ${CC:-gcc} -M -E -x c - | tr ' ' '\n' | grep 'stb_ds\.h$')" build/web/stb
    NODE_PATH=${NODE_PATH:-/usr/share/nodejs} emcc -std=gnu11 -O3 -msimd128 \
        -Wall -Wextra -Werror -Wno-missing-field-initializers -s MODULARIZE=1 -s EXPORT_NAME=kvcompModule \
        -s ENVIRONMENT=worker,node -s INVOKE_RUN=0 -s ALLOW_MEMORY_GROWTH=1 -s INITIAL_MEMORY=67108864 \
        -s TOTAL_STACK=5242880 -s ABORTING_MALLOC=0 -s EXPORTED_FUNCTIONS=_main,_malloc,_free \
        -Ibuild -Ibuild/web --embed-file "$model@/model" -o kvcomp_web.js "$@"
}

# kvcomp.html from data/page.html, whose lines @@GLUE@@ and @@WASM@@ become the program.
page() {
    awk '/^@@GLUE@@$/ { system("cat kvcomp_web.js"); next }
         /^@@WASM@@$/ { system("base64 -w 0 kvcomp_web.wasm"); next }
         !/^@@/ { print; fflush() }' data/page.html >kvcomp.html.part &&
        mv kvcomp.html.part kvcomp.html &&
        ls -l kvcomp.html | awk '{ printf "kvcomp.html: %.1f MB, opens by double click\n", $5 / 1e6 }'
}

install() {
    has_emcc || ${SHELL:-sh} data/install.sh emscripten node-acorn ||
        { echo "make web needs Debian's emscripten and node-acorn (or any emcc on the PATH)"; exit 1; }
}

what=$1
shift
case $what in
    install) install ;;
    build) install && program "$@" && page ;;
    test)
        if ! command -v emcc >/dev/null || ! command -v node >/dev/null; then
            echo "all 10 parts are left out: they need emscripten and node (make web installs them)"
        else
            ${MAKE:-make} --no-print-directory kvcomp.html && node data/web_test.js
        fi
        ;;
esac
