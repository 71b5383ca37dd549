// The report of a comparison, drawn by headless Chromium. Skipped where there is none.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "core/atomic_file.h"
#include "support/program.h"
#include "support/small_run.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

using Json = nlohmann::json;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

std::string FindChromium() {
  for (const char* path : {"/usr/bin/chromium", "/usr/bin/chromium-browser",
                           "/usr/bin/google-chrome", "/snap/bin/chromium"}) {
    if (fs::exists(path)) return path;
  }
  return "";
}

std::string Base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t word = 0;
    for (size_t k = 0; k < 3; ++k) {
      word = word << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0u);
    }
    for (size_t k = 0; k < 4; ++k) {
      text += i + k <= bytes.size() ? kDigits[word >> (18 - 6 * k) & 63] : '=';
    }
  }
  return text;
}

// The value of an attribute of the root element; empty without it.
std::string RootAttribute(const std::string& dom, const std::string& name) {
  const std::string root = dom.substr(dom.find("<html"), dom.find("<head") - dom.find("<html"));
  const std::string mark = name + "=\"";
  const size_t found = root.find(mark);
  if (found == std::string::npos) return "";
  const size_t begin = found + mark.size();
  return root.substr(begin, root.find('"', begin) - begin);
}

// Added to a page: what its canvases hold, once they are drawn.
constexpr const char* kCountColours = R"(
<script>
function coloursOf(canvas) {
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}
document.documentElement.dataset.blank =
  [...document.querySelectorAll('canvas')].filter(canvas => coloursOf(canvas) < 8).length;
</script>
)";

class ReportTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (FindChromium().empty()) return;
    shared_ = new TemporaryFolder;
    PrepareSmallCorpus(*shared_ / "corpus");
    RunConfig config = SmallRun(*shared_ / "corpus");
    config.training.threads = 1;
    std::ofstream(*shared_ / "small.toml") << ToToml(FieldsOf(config));
    // A name that would break a careless page.
    std::ofstream(*shared_ / "<i>&quot;.toml") << "base = \"adamw\"\n";
    compared_ = Program({TERRACE_PROGRAM, "compare", "small.toml", "--output", "study",
                         "--policies", "skewadam,<i>&quot;.toml", "--lr", "1x,10x", "--seeds", "2"},
                        {.folder = shared_->path(), .environment = {}})
                    .Wait();
  }
  static void TearDownTestSuite() { delete shared_; }

  void SetUp() override {
    if (FindChromium().empty()) GTEST_SKIP() << "there is no Chromium";
    ASSERT_EQ(compared_.exit_code, 0) << compared_.errors;
    page_ = ReadFile(*shared_ / "study/report.html");
  }

  // Standard output of Chromium on a page. It runs offline: no address but file: resolves.
  ProgramResult Open(const std::string& html, std::vector<std::string> options) const {
    const fs::path page = folder_ / "page.html";
    std::ofstream(page) << html;
    std::vector<std::string> arguments = {FindChromium(),
                                          "--headless",
                                          "--no-sandbox",
                                          "--disable-gpu",
                                          "--disable-dev-shm-usage",
                                          "--no-first-run",
                                          "--hide-scrollbars",
                                          "--host-resolver-rules=MAP * ~NOTFOUND",
                                          "--user-data-dir=" + (folder_ / "profile").string(),
                                          "--virtual-time-budget=3000"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    arguments.push_back("file://" + page.string());
    return Program(arguments,
                   {.folder = folder_.path(), .environment = {"HOME=" + folder_.path().string()}})
        .Wait();
  }

  // Where in a page they are.
  static std::pair<size_t, size_t> DataIn(const std::string& page) {
    const size_t begin = page.find('>', page.find("id=\"data\"")) + 1;
    return {begin, page.find("</script>", begin)};
  }
  // What the page shows.
  Json Data() const {
    const auto [begin, end] = DataIn(page_);
    return Json::parse(page_.substr(begin, end - begin));
  }
  // The page with other data.
  static std::string With(const Json& data, const std::string& page) {
    const auto [begin, end] = DataIn(page);
    return page.substr(0, begin) + data.dump() + page.substr(end);
  }

  static TemporaryFolder* shared_;
  static ProgramResult compared_;
  TemporaryFolder folder_;
  std::string page_;
};
TemporaryFolder* ReportTest::shared_ = nullptr;
ProgramResult ReportTest::compared_;

TEST_F(ReportTest, EveryChartIsDrawn) {
  const std::string dom = Open(page_ + kCountColours, {"--dump-dom"}).output;
  EXPECT_EQ(RootAttribute(dom, "data-report"), "drawn");
  // The front, four of quality, three of memory and speed, two of balance, one for each floored
  // population.
  EXPECT_EQ(RootAttribute(dom, "data-charts"), "16");
  EXPECT_EQ(RootAttribute(dom, "data-blank"), "0");
  // Spreads over two seeds, and none of a single value.
  EXPECT_THAT(dom, ContainsRegex("± [0-9]+\\.[0-9]"));
  EXPECT_THAT(dom, Not(HasSubstr("± NaN")));
  EXPECT_THAT(dom, Not(HasSubstr("± undefined")));
  // Names are text.
  EXPECT_THAT(dom, HasSubstr("&lt;i&gt;&amp;quot;"));
  EXPECT_THAT(dom, Not(HasSubstr("<i>")));
}

// Put before all scripts of a page: notes every text that a chart draws beyond its canvas, and what
// the chart of the front says.
constexpr const char* kWatchTexts = R"(<script>
const outside = [];
const front = new Set();
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function(text, x, y, ...rest) {
  const size = this.measureText(text);
  for (const dx of [-size.actualBoundingBoxLeft, size.actualBoundingBoxRight]) {
    const at = this.getTransform().transformPoint({x: x + dx, y});
    if (at.x < 0 || at.y < 0 || at.x > this.canvas.width || at.y > this.canvas.height) {
      outside.push(text);
    }
  }
  const table = document.querySelector('[aria-label="Results by policy"]');
  document.documentElement.dataset.hidden = table.scrollWidth - table.clientWidth;
  if (this.canvas.getAttribute('aria-label').includes('On the front')) front.add(text);
  document.documentElement.dataset.outside = outside.join('; ');
  document.documentElement.dataset.front = [...front].join('; ');
  return fillText.call(this, text, x, y, ...rest);
};
</script>)";

TEST_F(ReportTest, TextsFitTheirChartsAndTheFrontIsNamed) {
  Json data = Data();
  std::vector<std::string> front;
  for (Json& policy : data.at("policies")) {
    if (policy.at("on_front").get<bool>()) front.push_back(policy.at("policy"));
  }
  ASSERT_FALSE(front.empty());
  const std::string marked = page_.substr(0, page_.find("<head>") + 6) + kWatchTexts +
                             page_.substr(page_.find("<head>") + 6);
  for (const std::string size : {"1280,4000", "500,6000"}) {
    const std::string dom = Open(marked, {"--window-size=" + size, "--dump-dom"}).output;
    EXPECT_EQ(RootAttribute(dom, "data-report"), "drawn");
    EXPECT_EQ(RootAttribute(dom, "data-outside"), "") << size;
    // All columns of the table are in sight on a wide page.
    if (size.starts_with("1280")) {
      EXPECT_EQ(RootAttribute(dom, "data-hidden"), "0");
    }
    for (const std::string& policy : front) {
      if (policy.find('&') != std::string::npos) continue;  // another spelling in an attribute
      EXPECT_THAT(RootAttribute(dom, "data-front"), HasSubstr(policy)) << size;
    }
  }
  // A name that no chart has room for, and several that are in each other's way.
  const Json policy = data.at("policies").at(0);
  data.at("policies") = Json::array();
  data.at("sweep") = Json::array();
  for (int i = 0; i < 6; ++i) {
    data.at("policies").push_back(policy);
    data.at("policies").back().at("on_front") = true;
    data.at("policies").back().at("policy") = fmt::format("{}{}", std::string(100, 'w'), i);
  }
  const std::string dom = Open(With(data, marked), {"--window-size=500,6000", "--dump-dom"}).output;
  EXPECT_EQ(RootAttribute(dom, "data-report"), "drawn");
  EXPECT_THAT(RootAttribute(dom, "data-front"), HasSubstr("www…"));
}

TEST_F(ReportTest, AStudyWithoutAFrontOrWithoutSpreadIsDrawn) {
  Json data = Data();
  for (Json& policy : data.at("policies")) {
    policy.at("on_front") = false;
    policy.at("diverged") = 1;
    policy.at("spikes") = nullptr;
    policy.at("loss").at("std") = nullptr;
  }
  const std::string dom = Open(With(data, page_), {"--dump-dom"}).output;
  EXPECT_EQ(RootAttribute(dom, "data-report"), "drawn");
  EXPECT_THAT(dom, HasSubstr("A policy with diverged runs at its rate is no choice"));
}

TEST_F(ReportTest, AScreenshotShowsIt) {
  // On a wide page and on a narrow one; the picture goes through the browser to be measured.
  for (const std::string size : {"1280,4000", "500,6000"}) {
    Open(page_, {"--window-size=" + size, "--screenshot=" + (folder_ / "page.png").string()});
    ASSERT_TRUE(fs::exists(folder_ / "page.png"));
    const std::string picture = ReadFile(folder_ / "page.png");
    const std::string dom = Open(R"(<html><head></head><body><img><script>
const image = document.querySelector('img');
image.onload = () => {
  const canvas = document.createElement('canvas');
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const {data} = context.getImageData(0, 0, canvas.width, canvas.height);
  document.documentElement.dataset.width = canvas.width;
  document.documentElement.dataset.colours = new Set(new Uint32Array(data.buffer)).size;
};
image.src = 'data:image/png;base64,)" +
                                     Base64(picture) + "';</script></body></html>",
                                 {"--dump-dom"})
                                .output;
    EXPECT_EQ(RootAttribute(dom, "data-width"), size.substr(0, size.find(',')));
    const std::string colours = RootAttribute(dom, "data-colours");
    ASSERT_NE(colours, "");
    EXPECT_GT(std::stoi(colours), 500) << size;
    fs::remove(folder_ / "page.png");
  }
}

// The perplexity of a run that went wrong is infinite, which JSON calls null.
TEST_F(ReportTest, NumbersThatAreNotFiniteAreDrawnAround) {
  Json data = Data();
  for (Json& policy : data.at("policies")) {
    policy.at("perplexity") = {{"mean", nullptr}, {"std", nullptr}};
    for (Json& point : policy.at("validation")) point.at("perplexity") = policy.at("perplexity");
    for (Json& point : policy.at("curve")) {
      point.at("loss") = nullptr;
      point.at("imbalance") = nullptr;
    }
  }
  const std::string dom = Open(With(data, page_), {"--dump-dom"}).output;
  EXPECT_EQ(RootAttribute(dom, "data-report"), "drawn");
  EXPECT_THAT(dom, HasSubstr("∞"));
}

// These tests can fail.
TEST_F(ReportTest, AnErrorInAChartIsSeen) {
  std::string broken = page_;
  const size_t found = broken.find("new Chart(canvas, makeConfig())");
  ASSERT_NE(found, std::string::npos);
  broken.replace(found, 9, "new NoChart");
  EXPECT_EQ(RootAttribute(Open(broken, {"--dump-dom"}).output, "data-report"), "failed");
}

}  // namespace
}  // namespace terrace
