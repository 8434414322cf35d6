// app/trace.h - writes down what every pass computes, as tensors whose names say what they are: into a safetensors
// file (--trace), or to whoever takes them (the pictures of a page).
//
// It is an observer: a Method that stands behind the parts of a session and decides nothing. Tensors come in the order
// in which they are computed: pass0012.layer03.q is (T,H,D). Rows are named by tokens, never by their place in a head.
// Passes are numbered whether they are written down or not, so that a name means the same in a shorter trace.
#ifndef APP_TRACE_H
#define APP_TRACE_H
#include "../kvcomp.h"

// From now on the passes of this session are given to x->put; NULL: not any more.
void trace_session(Session *s, Trace *x);

typedef struct {                // a trace that becomes a file
    Trace trace;                // its put is trace_file_put
    SafeWriter out;             // begun by whoever opens it, its metadata written
} TraceFile;

// Trace.put of a TraceFile: the tensor goes to the file by the name passPPPP.NAME.
void trace_file_put(Trace *x, const char *name, const char *type, size_t size, const void *data, const int *dim,
                    int dims);

#endif
