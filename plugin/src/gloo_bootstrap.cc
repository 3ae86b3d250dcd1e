// SPDX-License-Identifier: Apache-2.0
//
// GlooBootstrap: choose an address of this host, listen, tell the others, connect.
#include <arpa/inet.h>
#include <gloo/transport/address.h>
#include <gloo/transport/tcp/device.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "bitopk/gloo_communicator.h"
#include "plugin/src/gloo_collectives.h"
#include "plugin/src/gloo_context.h"
#include "plugin/src/ranges.h"

namespace bitopk {
namespace internal {
namespace {

namespace tcp = gloo::transport::tcp;
using Clock = std::chrono::steady_clock;

// ---- The address of this host ----

struct InterfaceAddress {
  std::string name;
  std::string address;
  int family;
  bool loopback;
  bool usable;  // up and running
};

std::string NumericAddress(const sockaddr* address) {
  std::array<char, NI_MAXHOST> text = {};
  const socklen_t bytes =
      address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  const int rv = getnameinfo(address, bytes, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return rv == 0 ? std::string(text.data()) : std::string();
}

std::vector<InterfaceAddress> ListInterfaces() {
  std::vector<InterfaceAddress> list;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return list;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    const int family = each->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    InterfaceAddress found;
    found.name = each->ifa_name;
    found.address = NumericAddress(each->ifa_addr);
    found.family = family;
    found.loopback = (each->ifa_flags & IFF_LOOPBACK) != 0;
    found.usable = (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_RUNNING) != 0;
    list.push_back(found);
  }
  freeifaddrs(first);
  return list;
}

bool IsLoopback(const std::string& address) {
  return address.compare(0, 4, "127.") == 0 || address == "::1";
}

// The addresses of a name, IPv4 first. (gloo resolves names too, but does not survive one that is
// unknown.)
std::vector<std::string> Resolve(const std::string& name) {
  std::vector<std::string> found;
  for (const int family : {AF_INET, AF_INET6}) {
    addrinfo hints = {};
    hints.ai_family = family;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* first = nullptr;
    if (getaddrinfo(name.c_str(), nullptr, &hints, &first) != 0) continue;
    for (const addrinfo* each = first; each != nullptr; each = each->ai_next) {
      found.push_back(NumericAddress(each->ai_addr));
    }
    freeaddrinfo(first);
  }
  return found;
}

// Attributes of a device bound to `address`; nothing if that is no address of this host.
std::optional<tcp::attr> Bind(const std::string& address) {
  try {
    return tcp::CreateDeviceAttr(tcp::attr(address.c_str()));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

tcp::attr BindInterface(const std::string& name) {
  std::string known;
  const std::vector<InterfaceAddress> all = ListInterfaces();
  for (const int family : {AF_INET, AF_INET6}) {
    for (const InterfaceAddress& each : all) {
      if (each.family != family) continue;
      known += (known.empty() ? "" : ", ") + each.name;
      if (each.name != name) continue;
      if (const auto attr = Bind(each.address)) return *attr;
    }
  }
  throw InvalidArgumentError(StrCat("GlooBootstrap: interface with an address; got \"", name,
                                    "\", expected one of ", known));
}

tcp::attr BindHostname(const std::string& name) {
  for (const std::string& address : Resolve(name)) {
    if (const auto attr = Bind(address)) return *attr;
  }
  throw InvalidArgumentError(
      StrCat("GlooBootstrap: name or address of this host; got \"", name, "\""));
}

tcp::attr BindDefault() {
  std::array<char, 256> host = {};
  if (gethostname(host.data(), host.size() - 1) == 0) {
    for (const std::string& address : Resolve(host.data())) {
      if (IsLoopback(address)) continue;  // as in Debian's /etc/hosts: no use for other machines
      if (const auto attr = Bind(address)) return *attr;
    }
  }
  for (const InterfaceAddress& each : ListInterfaces()) {
    if (each.loopback || !each.usable || each.family != AF_INET) continue;
    if (const auto attr = Bind(each.address)) return *attr;
  }
  return BindHostname("127.0.0.1");
}

std::string DescribeInterface(const tcp::attr& attr) {
  std::string address = NumericAddress(reinterpret_cast<const sockaddr*>(&attr.ai_addr));
  for (const InterfaceAddress& each : ListInterfaces()) {
    if (each.address == address || (each.loopback && IsLoopback(address))) {
      return StrCat(each.name, " (", address, ")");
    }
  }
  return address;
}

// ---- The addresses that travel ----

constexpr std::uint32_t kAddressMagic = 0x41544f42;  // "BOTA"
constexpr std::uint32_t kAddressVersion = 1;

// In front of one gloo address for each rank, this rank's own (zeros) included.
struct AddressHeader {
  std::uint32_t magic;
  std::uint32_t version;
  std::uint32_t rank;
  std::uint32_t size;
  std::uint32_t each_bytes;
};

std::vector<std::uint8_t> PackAddresses(PairContext& context) {
  std::vector<std::vector<char>> each(static_cast<std::size_t>(context.size));
  AddressHeader header = {kAddressMagic, kAddressVersion, static_cast<std::uint32_t>(context.rank),
                          static_cast<std::uint32_t>(context.size), 0};
  for (int peer = 0; peer < context.size; ++peer) {
    if (peer == context.rank) continue;
    std::vector<char>& bytes = each[static_cast<std::size_t>(peer)];
    bytes = context.getPair(peer)->address().bytes();
    header.each_bytes = static_cast<std::uint32_t>(bytes.size());
  }
  std::vector<std::uint8_t> packed(sizeof(header) + each.size() * header.each_bytes, 0);
  std::memcpy(packed.data(), &header, sizeof(header));
  for (std::size_t peer = 0; peer < each.size(); ++peer) {
    if (each[peer].empty()) continue;
    std::memcpy(packed.data() + sizeof(header) + peer * header.each_bytes, each[peer].data(),
                header.each_bytes);
  }
  return packed;
}

// The address at which rank `from` listens for rank `to`, out of what `from` packed.
std::vector<char> UnpackAddress(const std::vector<std::uint8_t>& packed, int from, int to, int size,
                                std::size_t each_bytes) {
  AddressHeader header = {};
  if (packed.size() >= sizeof(header)) std::memcpy(&header, packed.data(), sizeof(header));
  const AddressHeader expected = {kAddressMagic, kAddressVersion, static_cast<std::uint32_t>(from),
                                  static_cast<std::uint32_t>(size),
                                  static_cast<std::uint32_t>(each_bytes)};
  BITOPK_CHECK_ARG(header.magic == expected.magic && header.version == expected.version,
                   "GlooBootstrap: addresses in place ", from,
                   " are no addresses of bitopk, version ", kAddressVersion);
  BITOPK_CHECK_ARG(header.rank == expected.rank && header.size == expected.size,
                   "GlooBootstrap: addresses in place ", from, " are of rank ", header.rank, " of ",
                   header.size, ", expected rank ", from, " of ", size);
  BITOPK_CHECK_ARG(
      header.each_bytes == expected.each_bytes &&
          packed.size() == sizeof(header) + static_cast<std::size_t>(size) * each_bytes,
      "GlooBootstrap: addresses of rank ", from, " have the wrong length; got ", packed.size());
  const auto* const begin = reinterpret_cast<const char*>(packed.data()) + sizeof(header) +
                            static_cast<std::size_t>(to) * each_bytes;
  return std::vector<char>(begin, begin + each_bytes);
}

std::uint64_t HashWorld(const std::vector<std::vector<std::uint8_t>>& addresses) {
  std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a
  for (const std::vector<std::uint8_t>& each : addresses) {
    for (const std::uint8_t byte : each) hash = (hash ^ byte) * 0x100000001b3U;
  }
  return hash;
}

}  // namespace
}  // namespace internal

struct GlooBootstrap::Impl {
  int rank = 0;
  int size = 0;
  std::chrono::milliseconds timeout{0};
  std::string interface_description;
  std::vector<std::uint8_t> address;
  std::shared_ptr<internal::PairContext> context;  // null after Connect
};

GlooBootstrap::GlooBootstrap(int rank, int size, const GlooOptions& options) {
  BITOPK_CHECK_ARG(size >= 1 && rank >= 0 && rank < size,
                   "GlooBootstrap: 0 <= rank < size; got rank ", rank, " of ", size);
  BITOPK_CHECK_ARG(options.timeout.count() > 0 && options.timeout < internal::kForever,
                   "GlooBootstrap: time-out; got ", options.timeout.count(),
                   " ms, expected more than 0 and less than 100 hours");
  BITOPK_CHECK_ARG(options.interface.empty() || options.hostname.empty(),
                   "GlooBootstrap: either an interface or a host name; got \"", options.interface,
                   "\" and \"", options.hostname, "\"");
  const internal::SigpipeBlock no_sigpipe;  // inherited by gloo's thread
  const gloo::transport::tcp::attr attr =
      !options.interface.empty()  ? internal::BindInterface(options.interface)
      : !options.hostname.empty() ? internal::BindHostname(options.hostname)
                                  : internal::BindDefault();
  impl_ = std::make_unique<Impl>();
  impl_->rank = rank;
  impl_->size = size;
  impl_->timeout = options.timeout;
  impl_->interface_description = internal::DescribeInterface(attr);
  try {
    auto device = std::make_shared<gloo::transport::tcp::Device>(attr);
    impl_->context =
        std::make_shared<internal::PairContext>(rank, size, std::move(device), options.timeout);
    impl_->address = internal::PackAddresses(*impl_->context);
  } catch (const std::exception& error) {
    throw CommunicationError(internal::StrCat("GlooBootstrap: cannot listen on ",
                                              impl_->interface_description, ": ", error.what(),
                                              " (rank ", rank, " of ", size, ")"));
  }
}

GlooBootstrap::~GlooBootstrap() = default;
GlooBootstrap::GlooBootstrap(GlooBootstrap&&) noexcept = default;
GlooBootstrap& GlooBootstrap::operator=(GlooBootstrap&&) noexcept = default;

const std::vector<std::uint8_t>& GlooBootstrap::address() const { return impl_->address; }

const std::string& GlooBootstrap::interface_description() const {
  return impl_->interface_description;
}

std::unique_ptr<Communicator> GlooBootstrap::Connect(
    const std::vector<std::vector<std::uint8_t>>& addresses) {
  const int rank = impl_->rank;
  const int size = impl_->size;
  BITOPK_CHECK_ARG(impl_->context != nullptr, "GlooBootstrap: Connect may be called once");
  BITOPK_CHECK_ARG(addresses.size() == static_cast<std::size_t>(size),
                   "GlooBootstrap: addresses of all ranks; got ", addresses.size(), ", expected ",
                   size);
  const std::size_t header_bytes = sizeof(internal::AddressHeader);
  const std::size_t each_bytes =
      (impl_->address.size() - header_bytes) / static_cast<std::size_t>(size);
  std::vector<std::vector<char>> peers;
  for (int peer = 0; peer < size; ++peer) {
    peers.push_back(internal::UnpackAddress(addresses[static_cast<std::size_t>(peer)], peer, rank,
                                            size, each_bytes));
  }

  const internal::SigpipeBlock no_sigpipe;
  const std::shared_ptr<internal::PairContext> context = std::move(impl_->context);
  const auto throw_unreachable = [&](const std::string& who, const std::exception& error) {
    throw CommunicationError(internal::StrCat("connecting: no connection with ", who, " within ",
                                              internal::DurationText(impl_->timeout), " from ",
                                              impl_->interface_description, ": ", error.what(),
                                              " (rank ", rank, " of ", size, ")"));
  };
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    try {
      context->getPair(peer)->connect(peers[static_cast<std::size_t>(peer)]);
    } catch (const std::exception& error) {
      throw_unreachable(internal::StrCat("rank ", peer), error);
    }
  }
  try {
    return std::make_unique<internal::GlooCommunicator>(context, impl_->timeout,
                                                        internal::HashWorld(addresses));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw_unreachable("a peer", error);
    throw;
  }
}

std::unique_ptr<Communicator> ConnectThroughFileStore(const std::string& directory, int rank,
                                                      int size, const GlooOptions& options) {
  namespace fs = std::filesystem;
  // gloo::rendezvous::FileStore counts its time-out in whole seconds and cannot say who is missing,
  // so the files are our own; like it, we write aside and rename, and poll, which works on network
  // file systems.
  GlooBootstrap bootstrap(rank, size, options);
  const auto path_of = [&](int r) { return fs::path(directory) / internal::StrCat("rank_", r); };
  std::error_code error;
  fs::create_directories(directory, error);
  BITOPK_CHECK_ARG(!fs::exists(path_of(rank)), "ConnectThroughFileStore: a fresh directory; \"",
                   directory, "\" has addresses of rank ", rank, " already");
  const fs::path draft = fs::path(directory) / internal::StrCat(".rank_", rank);
  {
    std::ofstream file(draft, std::ios::binary | std::ios::trunc);
    const std::vector<std::uint8_t>& address = bootstrap.address();
    file.write(reinterpret_cast<const char*>(address.data()),
               static_cast<std::streamsize>(address.size()));
    file.close();
    if (file) fs::rename(draft, path_of(rank), error);
    BITOPK_CHECK_ARG(file && !error, "ConnectThroughFileStore: cannot write to \"", directory,
                     "\"");
  }

  std::vector<std::vector<std::uint8_t>> addresses(static_cast<std::size_t>(size));
  const auto deadline = internal::Clock::now() + options.timeout;
  for (;;) {
    std::vector<int> missing;
    for (int peer = 0; peer < size; ++peer) {
      std::vector<std::uint8_t>& address = addresses[static_cast<std::size_t>(peer)];
      if (!address.empty()) continue;
      std::ifstream file(path_of(peer), std::ios::binary);
      if (file) address.assign(std::istreambuf_iterator<char>(file), {});
      if (address.empty()) missing.push_back(peer);
    }
    if (missing.empty()) break;
    if (internal::Clock::now() > deadline) {
      throw CommunicationError(internal::StrCat(
          "connecting: no sign of ", internal::ListRanks(missing), " in ", directory, " within ",
          internal::DurationText(options.timeout), " (rank ", rank, " of ", size, ")"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return bootstrap.Connect(addresses);
}

}  // namespace bitopk
