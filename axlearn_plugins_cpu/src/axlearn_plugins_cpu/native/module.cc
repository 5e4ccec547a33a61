// The Python module `axlearn_plugins_cpu._native`: exposes the handlers as capsules for `jax.ffi.register_ffi_target`.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "native.h"

static PyObject* capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
}

static PyObject* handlers(PyObject*, PyObject*) {
  return Py_BuildValue("{s:N,s:N}", "axlearn_attention", capsule(axlearn::attention), "axlearn_paged_attention",
                       capsule(axlearn::paged_attention));
}

static PyObject* instructions(PyObject*, PyObject*) {
  return PyLong_FromLongLong(axlearn::best_instructions());
}

static PyMethodDef methods[] = {
    {"handlers", handlers, METH_NOARGS, "Return a dict of name -> XLA FFI handler."},
    {"instructions", instructions, METH_NOARGS, "Return the best instruction set of the processor: 1, 2 (AVX2) or 3 (AVX-512)."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "C++ kernels.", 0, methods, nullptr, nullptr, nullptr, nullptr,
};

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }
