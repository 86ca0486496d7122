// The Python module metselect_dgl._C: importing it registers the operators of csrc/cpu and, in a
// build with CUDA, of csrc/cuda.

#include <Python.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace {

// By default glibc maps the memory of every large tensor anew and returns it to the system when it
// is freed, so each page faults when it is first written. Without mappings and trimming, freed
// memory stays in the process and is reused.
PyObject* keep_freed_memory(PyObject*, PyObject* keep) {
  const int kept = PyObject_IsTrue(keep);
  if (kept < 0) return nullptr;
#ifdef __GLIBC__
  const int mappings = kept ? 0 : 65536, trim = kept ? 2147483647 : 128 * 1024;
  const bool done = mallopt(M_MMAP_MAX, mappings) && mallopt(M_TRIM_THRESHOLD, trim);
  if (!kept) malloc_trim(0);
  return PyBool_FromLong(done);
#else
  Py_RETURN_FALSE;
#endif
}

PyMethodDef methods[] = {
    {"keep_freed_memory", keep_freed_memory, METH_O,
     "Keep freed memory in the process (True) or return it to the system (False); returns whether "
     "the C library supports it."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

extern "C" PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C",
                               "Compiled operators of torch.ops.metselect", -1, methods};
  return PyModule_Create(&module);
}
