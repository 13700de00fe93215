// The functions of NVRTC that this crate calls, by a C++ compiler: a source with simulator.h in front becomes a shared library, which
// stands for the cubin. Headers in include/ take the place of those that hold assembly.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

fs::path include_folder() {
  Dl_info info;
  dladdr((void*)include_folder, &info);
  return fs::path(info.dli_fname).parent_path() / "include";
}
std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Program {
  std::string source, name, log, library;
  std::vector<std::pair<std::string, std::string>> headers;
};

// What a C++ compiler does not take: arrays of dynamic shared memory. And an entry for the driver to each kernel.
std::string prepared(const std::string& source) {
  std::string text = std::regex_replace(source, std::regex(R"(extern __shared__ (\w+) (\w+)\[\];)"), "$1* $2 = ($1*)simulator::dynamic_shared();");
  const std::regex kernel(R"(extern "C" __global__ void\s+(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\()");
  std::string entries;
  for (std::sregex_iterator at(text.begin(), text.end(), kernel), end; at != end; ++at) {
    const std::string name = (*at)[1];
    entries += "extern \"C\" std::function<void()>* simulator_bind_" + name + "(void** a) { return new std::function<void()>(simulator::bind(" + name + ", a)); }\n";
  }
  return "#include <simulator.h>\n#line 1\n" + text + "\n" + entries +
         "extern \"C\" void simulator_run(std::function<void()>* kernel, const unsigned* grid, unsigned threads, unsigned shared) "
         "{ simulator::run(*kernel, grid, threads, shared); }\n";
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
const char* nvrtcGetErrorString(int) { return "the simulator's compiler failed"; }

int nvrtcCreateProgram(Program** program, const char* source, const char* name, int count, const char* const* bodies, const char* const* names) {
  // Sources that changed since the crate was built
  const char* folder = getenv("SIGMASCALE_SIMULATOR_SOURCES");
  const auto newest = [&](const char* name, const char* text) { return folder && *text ? read(fs::path(folder) / name) : text; };
  *program = new Program{newest((std::string(name) + ".cu").c_str(), source), name, {}, {}, {}};
  for (int i = 0; i < count; i++) (*program)->headers.push_back({names[i], newest(names[i], bodies[i])});
  return 0;
}
int nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, 0; }

int nvrtcCompileProgram(Program* p, int count, const char* const* options) {
  if (p->source.empty()) return 0;
  char folder[] = "/tmp/simulator-XXXXXX";
  if (!mkdtemp(folder)) return 1;
  const fs::path root = folder, headers = root / "headers";
  for (auto& [name, body] : p->headers) {
    if (fs::exists(include_folder() / name)) continue;
    fs::create_directories((headers / name).parent_path());
    std::ofstream(headers / name) << body;
  }
  std::ofstream(root / "kernel.cpp") << prepared(p->source);
  const char* compiler = getenv("CXX");
  std::string command = std::string(compiler ? compiler : "g++") + " -std=c++17 -O1 -g1 -fno-strict-aliasing -ffp-contract=off -w -shared -fPIC -o " +
                        (root / "kernel.so").string() + " -I " + include_folder().string() + " -I " + headers.string();
  for (int i = 0; i < count; i++)
    if (const char* define = strstr(options[i], "--define-macro=")) command += std::string(" '-D") + (define + 15) + "'";
  command += " " + (root / "kernel.cpp").string() + " > " + (root / "log").string() + " 2>&1";
  const int failed = system(command.c_str());
  p->log = read(root / "log");
  if (!failed) p->library = read(root / "kernel.so");
  if (!getenv("SIGMASCALE_SIMULATOR_KEEP")) fs::remove_all(root);
  return failed ? 6 : 0;
}

int nvrtcGetProgramLogSize(Program* p, size_t* size) { return *size = p->log.size() + 1, 0; }
int nvrtcGetProgramLog(Program* p, char* log) { return memcpy(log, p->log.c_str(), p->log.size() + 1), 0; }

// Of the empty program: a name of this simulator, by which compiled kernels are kept.
std::string build() {
  size_t hash = 0;
  for (auto& entry : fs::recursive_directory_iterator(include_folder()))
    if (entry.is_regular_file()) hash ^= std::hash<std::string>()(entry.path().string() + read(entry.path()));
  return "// Compiler Build ID: simulator " + std::to_string(hash) + "\n// Cuda compilation tools, simulator\n";
}
int nvrtcGetPTXSize(Program*, size_t* size) { return *size = build().size() + 1, 0; }
int nvrtcGetPTX(Program*, char* text) { return memcpy(text, build().c_str(), build().size() + 1), 0; }

// The library behind its length, which the driver is not told.
int nvrtcGetCUBINSize(Program* p, size_t* size) { return *size = 8 + p->library.size(), 0; }
int nvrtcGetCUBIN(Program* p, char* to) {
  const unsigned long long size = p->library.size();
  memcpy(to, &size, 8), memcpy(to + 8, p->library.data(), size);
  return 0;
}

}  // extern "C"
