/* SPDX-License-Identifier: Apache-2.0
 *
 * The head of numpy's array object, which numpy's ABI keeps since 1.0 (numpy/ndarraytypes.h,
 * PyArrayObject_fields).  Mirrored here so that the build needs no numpy; arrays.pyx compares what
 * it reads through it with __array_interface__ when the module is loaded and does not use it where
 * the two disagree.
 */
#ifndef KVCORE_NDARRAY_H
#define KVCORE_NDARRAY_H

#include <Python.h>

typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions;
    Py_ssize_t *strides;
    PyObject *base;
    PyObject *descr;
    int flags;
} kv_ndarray;

#define KV_NDARRAY_WRITEABLE 0x0400

#endif
