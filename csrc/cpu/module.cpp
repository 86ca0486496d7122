// The Python module metselect_dgl._C: importing it registers the ops, where it was built with CUDA
// also those of csrc/cuda.

#include <Python.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace {

// By default glibc maps every large tensor anew and hands it back when it is freed, and each of
// its pages costs a fault when it is first written. Without mappings and trimming, freed memory
// stays with the process and serves the next tensor.
PyObject* keep_freed_memory(PyObject*, PyObject* keep) {
  const int wanted = PyObject_IsTrue(keep);
  if (wanted < 0) return nullptr;
#ifdef __GLIBC__
  const int mappings = wanted ? 0 : 65536, trim = wanted ? 2147483647 : 128 * 1024;
  const bool done = mallopt(M_MMAP_MAX, mappings) && mallopt(M_TRIM_THRESHOLD, trim);
  if (!wanted) malloc_trim(0);
  return PyBool_FromLong(done);
#else
  Py_RETURN_FALSE;
#endif
}

PyMethodDef methods[] = {
    {"keep_freed_memory", keep_freed_memory, METH_O,
     "Keep freed memory for the next tensor (True), or return it as usual; whether it could."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

extern "C" PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "Compiled ops of torch.ops.metselect",
                               -1, methods};
  return PyModule_Create(&module);
}
