-- Groups, and how many of them are complete.

-- A group, a msgpack array. MEMBERS (rids of all rows, ascending), OLDEST (the lowest rid) and BAD (rids of failed rows) are kept
-- where the partition has whole groups. FAILURES: failed rows, HELD: rows that are tagged as not committed and are not failed,
-- HOMES: home -> how many rows lie there that are not failed. OWN: the row whose id is the group's name is in it.
local EXPECT, ROWS, MEMBERS, OLDEST, BAD, FAILURES, HELD, HOMES, OWN = 1, 2, 3, 4, 5, 6, 7, 8, 9

-- While it is used a group has two further entries: before, complete() of how it was loaded, and alike, what all of its rows are
-- alike in, where all of them are new.
local function no_group() return { 0, 0, '', '', '', 0, 0, {}, false } end

-- The home of a slot: the bytes of host and epoch in its key, the msgpack array {host, epoch, slot, generation}.
local function home_of(P, key)
  local home = P.places[key]
  if not home then
    home = string.sub(key, 2, skip(key, skip(key, 2)) - 1)
    P.places[key] = home
  end
  return home
end

local function pieces_of(cells) return cells and unpack_(cells) or {} end

-- Slot key and index of cells of one piece, by their bytes: most rows have one, and decoding it takes three times as long.
local function one_piece(cells)
  if not cells then return nil end
  local head, inner, b = string.byte(cells, 1, 3)
  local at, n
  if head ~= 0x91 or inner ~= 0x94 then return nil end
  if b >= 0xa0 and b < 0xc0 then at, n = 4, b - 0xa0 elseif b == 0xd9 then at, n = 5, string.byte(cells, 4) else return nil end
  local index, high, low = string.byte(cells, at + n, at + n + 2)
  if index == 0xcc then index = high elseif index == 0xcd then index = 256 * high + low elseif index >= 0x80 then return nil end
  return string.sub(cells, at, at + n - 1), index
end

-- The homes of a row's pieces, each once.
local function homes_of(P, pieces)
  local out = {}
  for _, piece in ipairs(pieces) do
    local home, known = home_of(P, piece[1]), false
    for _, other in ipairs(out) do known = known or other == home end
    if not known then out[#out + 1] = home end
  end
  return out
end

-- Adds a row to what its group counts (n = 1), or takes it out (-1).
local function count_row(g, row, homes, n)
  if row[FAILED] == 1 then
    g[FAILURES] = g[FAILURES] + n
    return
  end
  if row[COMMITTED] == 2 then g[HELD] = g[HELD] + n end
  for _, home in ipairs(homes) do
    local left = (g[HOMES][home] or 0) + n
    g[HOMES][home] = left > 0 and left or nil
  end
end

local function lower(a, b) -- by bytes: < depends on the server's locale
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function join_homes(names)
  if #names > 1 then table.sort(names, lower) end
  return table.concat(names)
end

-- The homes of a complete group; nil where it is not complete.
local function complete(P, g)
  local rows = g[ROWS]
  if rows == 0 or g[HELD] > 0 or rows - g[FAILURES] < (g[EXPECT] > 0 and g[EXPECT] or P.gsize or rows) then return nil end
  local names = {}
  for home in pairs(g[HOMES]) do names[#names + 1] = home end
  return join_homes(names)
end

-- The rows of these ids; `known` has some of them.
local function own_rows(P, names, known)
  local ask, own, out = {}, {}, {}
  for _, name in ipairs(names) do
    local row = known[name]
    if row then out[name] = row else ask[#ask + 1] = name end
  end
  for j, rid in ipairs(hmget(P.K .. 'i', ask)) do if rid then own[#own + 1] = rid end end
  for _, blob in ipairs(load_rows(P.K, own)) do
    local row = unpack_(blob)
    out[row[ID]] = row
  end
  return out
end

-- Loads groups by name into `into`, as they are before the call. `known`: rows by id, false for an id without a row: the group
-- of that name is left out where it has no rows, unless the partition has whole groups.
local function load_groups(P, names, into, known)
  local ask, bare = {}, {}
  for _, name in ipairs(names) do
    if not into[name] then ask[#ask + 1] = name; into[name] = true end
  end
  local blobs = hmget(P.K .. 'g', ask)
  for j, name in ipairs(ask) do
    local blob = blobs[j]
    if blob then
      into[name] = unpack_(blob)
      into[name].before = complete(P, into[name])
    elseif P.gsize or known[name] ~= false then
      into[name] = no_group()
      bare[#bare + 1] = name
    else
      into[name] = nil
    end
  end
  if P.gsize or #bare == 0 then return end
  for name, row in pairs(own_rows(P, bare, known)) do
    if row[GROUP] == name then
      local g = into[name]
      g[ROWS], g[OWN] = 1, true
      count_row(g, row, homes_of(P, pieces_of(row[CELLS])), 1)
      g.before = complete(P, g)
    end
  end
end

local function save_groups(P, groups)
  local set, del = {}, {}
  for name, g in pairs(groups) do
    local before, after = g.before, complete(P, g)
    if before ~= after then
      if before then count_whole(P, before, -1) end
      if after then count_whole(P, after, 1) end
    end
    if g[ROWS] > 1 or (g[ROWS] == 1 and (P.gsize or g[EXPECT] > 0 or not g[OWN])) then
      set[#set + 1] = name
      set[#set + 1] = pack({ unpack(g, 1, OWN) })
    else
      del[#del + 1] = name
    end
  end
  if #set > 0 then set[#set + 1] = PAD; set[#set + 1] = pack(no_group()) end
  many('HSET', P.K .. 'g', set)
  many('HDEL', P.K .. 'g', del)
end

-- In an index a group is named by its oldest row first: of those that became ready at once, the oldest comes first.
local function rename(P, g, name, oldest)
  if g[OLDEST] ~= '' and g[OLDEST] ~= oldest then P.stale[#P.stale + 1] = g[OLDEST] .. name end
  g[OLDEST] = oldest
end

local function without(rids, gone)
  local kept = {}
  for _, rid in ipairs(split(rids)) do if not gone[rid] then kept[#kept + 1] = rid end end
  return kept
end

-- Notes whether a row of a group is failed: no claim gives it, and the group has to be whole without it.
local function note_failed(P, g, rid, failed)
  if not P.gsize or (g[BAD] == '' and not failed) then return end
  local kept = without(g[BAD], { [rid] = true })
  if failed then kept[#kept + 1] = rid end
  g[BAD] = table.concat(kept)
end

-- The rows of a group that a claim may give.
local function fit(g)
  if g[BAD] == '' then return split(g[MEMBERS]) end
  local bad = {}
  for _, rid in ipairs(split(g[BAD])) do bad[rid] = true end
  return without(g[MEMBERS], bad)
end

local function fit_count(g) return g[ROWS] - g[FAILURES] end

local function join(P, g, name, rid, id)
  g[ROWS] = g[ROWS] + 1
  if id == name then g[OWN] = true end
  if not P.gsize then return end
  g[MEMBERS] = g[MEMBERS] .. rid
  if rid < string.sub(g[MEMBERS], -2 * WIDTH, -WIDTH - 1) then -- a row that was in another group before
    local members = split(g[MEMBERS])
    table.sort(members)
    g[MEMBERS] = table.concat(members)
  end
  if g[OLDEST] == '' or rid < g[OLDEST] then rename(P, g, name, rid) end
end

-- n rows leave a group: those with gone[rid].
local function leave(P, g, name, gone, n)
  g[ROWS] = g[ROWS] - n
  if g[ROWS] == 0 then g[EXPECT] = 0 end
  if not P.gsize then return end
  local kept, oldest = g[ROWS] > 0 and without(g[MEMBERS], gone) or {}, nil
  for _, rid in ipairs(kept) do if not oldest or rid < oldest then oldest = rid end end
  g[MEMBERS] = table.concat(kept)
  rename(P, g, name, oldest or '')
  if g[BAD] ~= '' then g[BAD] = table.concat(without(g[BAD], gone)) end
end
